//! Machines to simulate: who is joined to whom, how fast.
//!
//! A machine is a pure description: directed links with a bandwidth, a route for each pair of ranks, and what a rank's
//! processor takes. The built-in ones say in their files where their figures come from.

mod dgx;
mod fat_tree;
pub mod graph;
mod host;
mod switch;
mod torus;

use std::fmt::Debug;

pub use dgx::{Dgx, Protocol};
pub use fat_tree::FatTree;
pub use graph::Graph;
pub use host::Host;
pub use switch::Switch;
pub use torus::Torus;

/// One direction of a link, or something else that transfers share: a bus, a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId {
    /// What kind of link: an index into [`Machine::kinds`].
    pub kind: u16,
    /// Which one. In a machine with a [period](Machine::period) of b ranks, the rank b further on has link `at` + b where this rank has `at`.
    pub at: u32,
}

/// What a rank's processor takes. Seconds, and seconds per byte.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Costs {
    /// The call itself, once.
    pub call: f64,
    /// Each end of a message.
    pub overhead: f64,
    /// A byte combined (gamma).
    pub reduce: f64,
    /// A byte copied from memory to memory.
    pub copy: f64,
}

/// A way of numbering the ranks anew under which a machine or a set of programs may look the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Translation {
    /// Rank r becomes r + b modulo the number of ranks.
    Rotation,
    /// Rank r becomes r xor b.
    Xor,
}

/// What is simulated on.
pub trait Machine: Debug + Sync {
    /// A name with its parameters, to print.
    fn name(&self) -> String;
    /// Places for ranks.
    fn ranks(&self) -> usize;
    /// What the ranks' processors take.
    fn costs(&self) -> Costs;
    /// Names of the kinds of links, at most [`MOST_KINDS`].
    fn kinds(&self) -> Vec<String>;
    /// Bytes per second of one link.
    fn bandwidth(&self, link: LinkId) -> f64;
    /// Bytes per second of one transfer at most, whatever its links would allow.
    fn fastest(&self) -> f64 {
        f64::INFINITY
    }
    /// A name for a link, to print.
    fn link_name(&self, link: LinkId) -> String;
    /// The links that a message takes, in order, into `links`; gives its latency (alpha) in seconds.
    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64;
    /// The smallest b so that numbering `ranks` ranks anew by a multiple of b changes no route and no bandwidth; `None` where there is none. It
    /// divides `ranks`; for [`Translation::Xor`] both are powers of two.
    fn period(&self, _: Translation, _ranks: usize) -> Option<usize> {
        None
    }
}

/// Most kinds of links that a machine may tell apart.
pub const MOST_KINDS: usize = 8;

/// `block` where it is a period of `ranks`.
fn divides(translation: Translation, block: usize, ranks: usize) -> Option<usize> {
    let powers = block.is_power_of_two() && ranks.is_power_of_two();
    (block < ranks && ranks.is_multiple_of(block) && (translation == Translation::Rotation || powers)).then_some(block)
}
