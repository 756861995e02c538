//! The needs of each algorithm in units of the model: hops, messages, bytes, additions, copies, synchronisations.
//!
//! A file per algorithm has the terms of one *window*, in multiples of a segment of that window, and the share that
//! leaves the host. Terms with n-1, D and log₂n are those of the tables in [`crate::algorithm`]; the tests count all of
//! them in the programs.
//!
//! One-shot and staged have no programs, so their terms are written by hand. Two-shot is not here: it is taken whenever
//! all buffers allow it. Those of `hierarchical` depend on the hosts, and [`estimate`](super::estimate) takes them
//! itself.
//!
//! To add an algorithm, write a file here with `work` and `crossing`, and add a line to each of [`work`] and
//! [`crossing`]. An algorithm without a program, which does not cut the buffer with [`cut`], also states its number of
//! windows in [`terms`].

mod all_pairs;
mod direct;
mod halving_doubling;
pub(super) mod hierarchical;
mod one_shot;
mod recursive_doubling;
mod ring;
mod staged;
#[cfg(test)]
mod tests;
mod tree;

use super::placement::{Crossing, Placement};
use crate::algorithm::{Shape, cut, double_tree, supports, through_memory};
use crate::schedule::Partition;
use crate::wire::Algorithm;

/// Work for one window. A message has two ends, the sender's and the receiver's, and each counts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Ends of messages. A *hop* is two of them.
    pub messages: f64,
    /// Number of them that belong to messages which arrive directly after another one of the same rank: over TCP the
    /// two travel together.
    pub joined: f64,
    /// In a chain: ends of other messages that its ranks handle before they forward the chain's own. A rank sends and
    /// receives one message after the other (LogP's overhead o), so messages outside the chain also take time.
    pub queued: f64,
    /// Bytes at these ends, in segments.
    pub bytes: f64,
    /// Bytes combined, in segments: on top of being received or copied.
    pub reduced: f64,
    /// Bytes copied from memory to memory, in segments.
    pub copied: f64,
    /// Times that a rank waits for a flag of another one (algorithms over shared buffers, which send no messages).
    pub syncs: f64,
}

impl Load {
    /// `messages` messages with `bytes` segments in all, both ends counted.
    fn hops(messages: f64, bytes: f64) -> Load {
        Load { messages: 2.0 * messages, bytes: 2.0 * bytes, ..Load::default() }
    }

    /// `messages` ends of messages, with `bytes` segments at them.
    fn ends(messages: f64, bytes: f64) -> Load {
        Load { messages, bytes, ..Load::default() }
    }

    fn joining(self, joined: f64) -> Load {
        Load { joined, ..self }
    }

    fn queueing(self, queued: f64) -> Load {
        Load { queued, ..self }
    }

    fn reducing(self, reduced: f64) -> Load {
        Load { reduced, ..self }
    }

    fn copying(self, copied: f64) -> Load {
        Load { copied, ..self }
    }
}

/// The work of a collective for one window, in three views.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// The longest chain of dependent work, across ranks.
    pub path: Load,
    /// The busiest rank.
    pub busiest: Load,
    /// The average over the ranks.
    pub mean: Load,
}

impl Work {
    /// Returns the work of ranks with equal loads: the chain is a rank's load, with the two ends of a message joined.
    fn symmetric(hops: f64, load: Load) -> Work {
        Work { path: Load { messages: 2.0 * hops, joined: 0.0, copied: 0.0, ..load }, busiest: load, mean: load }
    }
}

/// The terms of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// Windows that the buffer is cut into; they follow each other through the pipeline.
    pub windows: f64,
    /// Bytes of a segment in one window.
    pub window: f64,
    /// Bytes of the rank's input and output together.
    pub footprint: f64,
    /// The terms of one window.
    pub work: Work,
}

impl Terms {
    /// Messages one after the other in the first window.
    pub fn hops(&self) -> f64 {
        self.work.path.messages / 2.0
    }

    /// Bytes that the busiest rank sends and receives in the whole call.
    pub fn wire_bytes(&self) -> f64 {
        self.work.busiest.bytes * self.window * self.windows
    }

    /// Bytes that the busiest rank combines in the whole call.
    pub fn reduced_bytes(&self) -> f64 {
        self.work.busiest.reduced * self.window * self.windows
    }

    /// Bytes that the busiest rank copies in the whole call.
    pub fn copied_bytes(&self) -> f64 {
        self.work.busiest.copied * self.window * self.windows
    }

    /// Times that the busiest rank waits for a flag in the whole call.
    pub fn syncs(&self) -> f64 {
        self.work.busiest.syncs * self.windows
    }
}

/// The terms of a call with segments of `bytes` bytes and messages of at most `message` bytes; `None` when the
/// algorithm does not support it.
pub fn terms(algorithm: Algorithm, shape: &Shape, bytes: usize, message: usize) -> Option<Terms> {
    if matches!(algorithm, Algorithm::OneShot | Algorithm::Staged) {
        let possible = shape.ranks > 1 && shape.root < shape.ranks && through_memory(shape.collective);
        let (work, windows): (fn(&Shape) -> Work, _) = match algorithm {
            Algorithm::Staged => (staged::work, bytes.div_ceil(message.max(1)).max(1)),
            _ => (one_shot::work, 1),
        };
        let (window, footprint) = (bytes as f64 / windows as f64, bytes as f64 * segments(shape));
        return possible.then(|| Terms { windows: windows as f64, window, footprint, work: work(shape) });
    }
    let work = work(algorithm, shape)?;
    let (parts, span) = cut(algorithm, shape)?;
    let windows = Partition::new(bytes, 1, parts, message / span).windows() as f64;
    Some(Terms { windows, window: bytes as f64 / windows, footprint: bytes as f64 * segments(shape), work })
}

/// Segments of input and output of the rank with the most.
fn segments(shape: &Shape) -> f64 {
    // All ranks except the root are alike.
    let of = |rank| shape.input_segments(rank) + shape.output_segments(rank);
    of(shape.root).max(of((shape.root + 1) % shape.ranks.max(1))) as f64
}

/// The work of one window; `None` when the algorithm does not support the collective.
pub fn work(algorithm: Algorithm, shape: &Shape) -> Option<Work> {
    if !supports(algorithm, shape) {
        return None;
    }
    if shape.ranks == 1 {
        return Some(alone());
    }
    let mut work = match algorithm {
        Algorithm::Ring => ring::work(shape),
        Algorithm::Tree => tree::one(shape),
        Algorithm::DoubleTree => tree::two(shape),
        Algorithm::Direct => direct::work(shape),
        Algorithm::HalvingDoubling => halving_doubling::work(shape),
        Algorithm::AllPairs => all_pairs::work(shape),
        Algorithm::RecursiveDoubling => recursive_doubling::work(shape),
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => return None,
    };
    let channels = match algorithm {
        Algorithm::DoubleTree => double_tree::channels(shape),
        _ => shape.channels,
    };
    work.busiest.messages *= channels as f64;
    work.mean.messages *= channels as f64;
    work.busiest.joined *= channels as f64;
    work.mean.joined *= channels as f64;
    for load in [&mut work.path, &mut work.busiest, &mut work.mean] {
        if !shape.combines() {
            load.reduced = 0.0;
        }
    }
    Some(work)
}

/// The share that leaves the host; all or nothing if all links are of one kind.
pub fn crossing(algorithm: Algorithm, shape: &Shape, placement: Placement) -> Crossing {
    match placement.hosts(shape.ranks) {
        1 => Crossing::of(0.0),
        hosts if hosts == shape.ranks => Crossing::of(1.0),
        _ => match algorithm {
            Algorithm::Ring => ring::crossing(shape, placement),
            Algorithm::Tree | Algorithm::DoubleTree => tree::crossing(shape, placement),
            Algorithm::Direct => direct::crossing(shape, placement),
            Algorithm::HalvingDoubling => halving_doubling::crossing(shape, placement),
            Algorithm::AllPairs => all_pairs::crossing(shape, placement),
            Algorithm::RecursiveDoubling => recursive_doubling::crossing(shape, placement),
            Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => Crossing::of(0.0),
        },
    }
}

/// One rank: every collective is a copy.
fn alone() -> Work {
    let copy = Load::default().copying(1.0);
    Work { path: copy, busiest: copy, mean: copy }
}

/// Segments that `rank` copies while it reduces one in rank order: scratch memory holds the sums of the ranks before
/// it. `apart`: the output is not the scratch memory, so the last rank also copies its input.
fn rank_order_copies(ranks: usize, rank: usize, apart: bool) -> f64 {
    f64::from(u8::from(rank >= 2)) + f64::from(u8::from(rank >= 2 && rank + 1 == ranks && apart))
}

/// Messages of n-1 edges, averaged over n ranks: a chain or a tree.
fn edges(n: f64) -> Load {
    Load::ends(2.0 * (n - 1.0) / n, 2.0 * (n - 1.0) / n).reducing((n - 1.0) / n)
}
