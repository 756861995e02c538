//! How far a rank has come: written by the executor without locks, read by the monitor, known to the store.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Progress of one communicator on one rank. The executor writes, the heartbeat reads; values may be torn between fields,
/// which is good enough to name who waits for whom. On a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
pub struct Progress {
    /// Sequence number of the call that was started last; 0 before the first if the caller counts from 1.
    pub seq_started: AtomicU64,
    /// Sequence number of the call that was done last.
    pub seq_done: AtomicU64,
    /// Rank that the communicator waits for now, or [`Progress::NOBODY`].
    pub waiting_on: AtomicU32,
    /// Code of the call that runs ([`Collective`](crate::wire::Collective)).
    pub op: AtomicU8,
}

impl Progress {
    /// `waiting_on` when nothing is awaited.
    pub const NOBODY: u32 = u32::MAX;

    /// The state of a new communicator.
    pub fn new() -> Self {
        Progress {
            seq_started: AtomicU64::new(0),
            seq_done: AtomicU64::new(0),
            waiting_on: AtomicU32::new(Self::NOBODY),
            op: AtomicU8::new(0),
        }
    }

    /// Call `seq` with this code starts.
    pub fn start(&self, seq: u64, op: u8) {
        self.op.store(op, Relaxed);
        self.seq_started.store(seq, Relaxed);
    }

    /// The running call waits for `rank`, or for nobody.
    pub fn wait_on(&self, rank: Option<usize>) {
        self.waiting_on.store(rank.map_or(Self::NOBODY, |r| r as u32), Relaxed);
    }

    /// Call `seq` is done.
    pub fn done(&self, seq: u64) {
        self.wait_on(None);
        self.seq_done.store(seq, Relaxed);
    }

    /// The values as they are now.
    pub fn snapshot(&self) -> Snapshot {
        let waiting_on = self.waiting_on.load(Relaxed);
        Snapshot {
            seq_started: self.seq_started.load(Relaxed),
            seq_done: self.seq_done.load(Relaxed),
            waiting_on: (waiting_on != Self::NOBODY).then_some(waiting_on as usize),
            op: self.op.load(Relaxed),
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

/// A [`Progress`] at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Snapshot {
    /// Call that was started last.
    pub seq_started: u64,
    /// Call that was done last.
    pub seq_done: u64,
    /// Rank that is awaited.
    pub waiting_on: Option<usize>,
    /// Code of the call.
    pub op: u8,
}

/// Whether a rank is there, as the store sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RankState {
    /// Its connection is open. It may still be stopped or stuck: see [`Health::age`].
    Alive,
    /// It said goodbye.
    Left,
    /// Its connection closed without a goodbye; why, in words.
    Lost(String),
}

/// What the store knows of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The rank.
    pub rank: usize,
    /// Is it there?
    pub state: RankState,
    /// Time since the store last heard from it.
    pub age: Duration,
    /// Progress of the communicator that was asked about, as of its last heartbeat; `None` if it does not have it.
    pub progress: Option<Snapshot>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_shows_what_was_written() {
        let p = Progress::new();
        assert_eq!(p.snapshot(), Snapshot::default());
        p.start(4, 2);
        p.wait_on(Some(3));
        assert_eq!(p.snapshot(), Snapshot { seq_started: 4, seq_done: 0, waiting_on: Some(3), op: 2 });
        p.done(4);
        assert_eq!(p.snapshot(), Snapshot { seq_started: 4, seq_done: 4, waiting_on: None, op: 2 });
    }
}
