//! Source of events: a communicator and its links.

use std::sync::Arc;

use super::sink::Sink;

/// A communicator's identity in the trace.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) sink: Arc<Sink>,
    pub(super) comm: u32,
    /// World rank by rank.
    pub(super) members: Vec<usize>,
}

impl Source {
    /// World rank of a rank of the communicator.
    pub(super) fn world(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }
}

/// A communicator's links as the recorder sees them: the index is the executor's.
#[derive(Debug)]
pub(super) struct Link {
    /// World rank.
    pub(super) peer: usize,
    pub(super) channel: u32,
    /// Messages so far.
    pub(super) sent: u32,
    pub(super) received: u32,
}
