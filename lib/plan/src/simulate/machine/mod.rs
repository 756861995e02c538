//! Machines to simulate: links, routes and speeds.
//!
//! A machine is a pure description: directed links with a bandwidth, a route for each pair of ranks, and the costs of a
//! rank's processor. The files of the built-in machines give the sources of their figures.

pub mod description;
mod dgx;
mod fat_tree;
pub mod graph;
mod host;
mod nccl_xml;
pub mod nominal;
mod switch;
mod torus;

use std::fmt::Debug;

pub use dgx::{Dgx, Protocol};
pub use fat_tree::FatTree;
pub use graph::Graph;
pub use host::Host;
pub use switch::Switch;
pub use torus::Torus;

use super::bound::Bound;
use crate::algorithm::Hosts;
use crate::schedule::Shape;

/// One direction of a link, or something else that transfers share: a bus, a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId {
    /// Kind of the link: an index into [`Machine::kinds`].
    pub kind: u16,
    /// Number of the link. In a machine with a [period](Machine::period) of b ranks, if this rank has link `at`, the
    /// rank b further on has link `at` + b.
    pub at: u32,
}

/// Costs of a rank's processor, in seconds and seconds per byte.
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

/// A renumbering of the ranks under which a machine or a set of programs may look the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Translation {
    /// Rank r becomes r + b modulo the number of ranks.
    Rotation,
    /// Rank r becomes r xor b.
    Xor,
}

/// A machine to simulate.
pub trait Machine: Debug + Sync {
    /// A name with its parameters, to print.
    fn name(&self) -> String;
    /// Most ranks.
    fn ranks(&self) -> usize;
    /// Costs of the ranks' processors.
    fn costs(&self) -> Costs;
    /// Names of the kinds of links, at most [`MOST_KINDS`].
    fn kinds(&self) -> Vec<String>;
    /// Bytes per second of one link.
    fn bandwidth(&self, link: LinkId) -> f64;
    /// Bytes per second of one transfer at most, even if its links allow more.
    fn fastest(&self) -> f64 {
        f64::INFINITY
    }
    /// A name for a link, to print.
    fn link_name(&self, link: LinkId) -> String;
    /// Writes the links that a message takes, in order, into `links`; returns its latency (alpha) in seconds.
    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64;
    /// The hosts of the first `ranks` ranks, where the machine tells them apart.
    fn hosts(&self, _ranks: usize) -> Hosts {
        Hosts::default()
    }
    /// Least time of a call of `shape` that the links allow; `None` where that is not computed.
    fn bound(&self, _shape: &Shape) -> Option<Bound> {
        None
    }
    /// The smallest b such that renumbering `ranks` ranks by a multiple of b changes no route and no bandwidth; `None`
    /// if there is none. It divides `ranks`; for [`Translation::Xor`] both are powers of two.
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
