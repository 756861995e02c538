//! Progress of a rank: written by the executor without locks, read by the monitor, sent to the store.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::calls::{COMPARED, Calls, Digests, Keys, Made};
use super::messages::{Message, Messages};
use super::ring::{RECORDED, Recorded};
use tinynccl_plan::wire::Header;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::ticks;

/// Progress of one communicator on one rank. The executor writes, the heartbeat reads; values may be torn between
/// fields, which is good enough to name who waits for whom, but a call is read whole. On separate cache lines.
#[derive(Debug)]
#[repr(align(64))]
pub struct Progress {
    /// Sequence number of the call that was started last; 0 before the first if the caller counts from 1.
    pub seq_started: AtomicU64,
    /// Sequence number of the call that was done last.
    pub seq_done: AtomicU64,
    /// Rank that the communicator waits for now, or [`Progress::NOBODY`].
    pub waiting_on: AtomicU32,
    /// No more calls will come.
    pub closed: AtomicBool,
    /// Number of the communicator's ranks; 0 if the caller does not set it.
    pub ranks: AtomicU32,
    calls: Calls,
    messages: Messages,
    /// Number of the last call that was sent to the store.
    sent: AtomicU32,
    change: Change,
}

/// Moment at which numbers of calls were last seen to change. Each look notices it, a heartbeat for example: the
/// thread that makes the calls reads no clock.
#[derive(Debug)]
pub struct Change {
    numbers: AtomicU64,
    /// Milliseconds of this process's clock.
    seen: AtomicU64,
}

impl Default for Change {
    /// Nothing has changed since now.
    fn default() -> Change {
        Change { numbers: AtomicU64::new(0), seen: AtomicU64::new(now()) }
    }
}

impl Change {
    /// Looks at the numbers of the calls that were started and done last. Returns the milliseconds since a look found
    /// others than the look before it.
    pub fn look(&self, started: u64, done: u64) -> u64 {
        self.look_at(started, done, now())
    }

    fn look_at(&self, started: u64, done: u64, now: u64) -> u64 {
        let numbers = started << 32 | done & u64::from(u32::MAX);
        if self.numbers.swap(numbers, Relaxed) != numbers {
            self.seen.store(now, Relaxed);
        }
        now.saturating_sub(self.seen.load(Relaxed))
    }
}

/// Milliseconds since the first question for them.
fn now() -> u64 {
    static CLOCK: OnceLock<Instant> = OnceLock::new();
    CLOCK.get_or_init(Instant::now).elapsed().as_millis() as u64
}

impl Progress {
    /// Value of `waiting_on` when no rank is awaited.
    pub const NOBODY: u32 = u32::MAX;

    /// The state of a new communicator with this number, of the job with this secret.
    pub fn new(secret: &Secret, comm: u32) -> Self {
        ticks::start();
        Progress {
            seq_started: AtomicU64::new(0),
            seq_done: AtomicU64::new(0),
            waiting_on: AtomicU32::new(Self::NOBODY),
            closed: AtomicBool::new(false),
            ranks: AtomicU32::new(0),
            calls: Calls::new(Keys::of(secret, comm)),
            messages: Messages::default(),
            sent: AtomicU32::new(0),
            change: Change::default(),
        }
    }

    /// This call starts.
    #[inline]
    pub fn start(&self, call: &Header) -> Digests {
        let digests = self.calls.push(call);
        self.seq_started.store(u64::from(call.seq), Release);
        digests
    }

    /// A hash of a list of calls that one message stands for; the same on all ranks that give the same list.
    pub fn hash(&self, list: impl Iterator<Item = [u64; 2]>) -> u64 {
        self.calls.keys().hash(list)
    }

    /// This message starts.
    #[inline]
    pub fn message(&self, message: &Message) {
        self.messages.push(message);
    }

    /// The last calls, in order: as many as are compared.
    pub fn calls(&self) -> Vec<Made> {
        self.calls.last(self.started(), COMPARED).into_iter().map(Made::from).collect()
    }

    /// All calls that are recorded, in order.
    pub fn recorded(&self) -> Vec<Recorded> {
        self.calls.last(self.started(), RECORDED)
    }

    /// The last messages, in order, each with whether it is over.
    pub fn messages(&self, most: usize) -> Vec<(Recorded, bool)> {
        self.messages.last(most)
    }

    fn started(&self) -> u32 {
        self.seq_started.load(Acquire) as u32
    }

    /// Returns the calls that were not sent to the store yet, and marks them as sent.
    pub(in crate::bootstrap) fn unsent(&self) -> Vec<Made> {
        let calls = self.calls.since(self.sent.load(Relaxed), self.started());
        if let Some(last) = calls.last() {
            self.sent.store(last.seq(), Relaxed);
        }
        calls
    }

    /// Records that the running call waits for `rank`, or for no rank.
    pub fn wait_on(&self, rank: Option<usize>) {
        if rank.is_some() {
            self.waits();
        }
        self.waiting_on.store(rank.map_or(Self::NOBODY, |r| r as u32), Relaxed);
    }

    /// Notes the time of what is under way: it takes long.
    #[cold]
    fn waits(&self) {
        let started = self.seq_started.load(Relaxed);
        if started != self.seq_done.load(Relaxed) {
            self.calls.waits(started as u32);
        }
        self.messages.waits();
    }

    /// Call `seq` is done, and the messages before it.
    #[inline]
    pub fn done(&self, seq: u64) {
        self.waiting_on.store(Self::NOBODY, Relaxed);
        if self.seq_done.load(Relaxed) != seq {
            self.calls.over(seq as u32);
            self.seq_done.store(seq, Relaxed);
        }
        self.messages.over();
    }

    /// Milliseconds since a look found that calls and messages go on.
    fn quiet(&self, started: u64, done: u64) -> u64 {
        let (begun, over) = self.messages.numbers();
        self.change.look(started + u64::from(begun), done + u64::from(over))
    }

    /// The values as they are now.
    pub fn snapshot(&self) -> Snapshot {
        let waiting_on = self.waiting_on.load(Relaxed);
        let seq_started = self.seq_started.load(Acquire);
        let seq_done = self.seq_done.load(Relaxed);
        Snapshot {
            seq_started,
            seq_done,
            quiet: Quiet(self.quiet(seq_started, seq_done)),
            waiting_on: (waiting_on != Self::NOBODY).then_some(waiting_on as usize),
            closed: self.closed.load(Relaxed),
            ranks: self.ranks.load(Relaxed),
            call: self.calls.get(seq_started as u32),
        }
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
    /// No more calls will come.
    pub closed: bool,
    /// Number of the communicator's ranks, if it is known.
    #[serde(default)]
    pub ranks: u32,
    /// Time since the numbers were last seen to change.
    #[serde(default)]
    pub quiet: Quiet,
    /// Call that was started last.
    pub call: Option<Made>,
}

/// Milliseconds since a change was seen, to a heartbeat. All are equal: the age is no part of what a rank has done.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Quiet(pub u64);

impl PartialEq for Quiet {
    fn eq(&self, _: &Quiet) -> bool {
        true
    }
}

impl Eq for Quiet {}

/// State of a rank, as the store sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankState {
    /// Its connection is open. It may still be stopped or stuck: see [`Health::age`].
    Alive,
    /// The rank said goodbye.
    Left,
    /// Its connection closed without a goodbye, with the reason as a text.
    Lost(String),
}

/// State and progress of one rank, as the store knows them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The rank.
    pub rank: usize,
    /// State of its connection.
    pub state: RankState,
    /// Time since its last message to the store.
    pub age: Duration,
    /// Progress of the requested communicator, as of its last heartbeat; `None` if it does not have it.
    pub progress: Option<Snapshot>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_of_a_change_begins_with_the_look_that_finds_it() {
        let change = Change { numbers: AtomicU64::new(0), seen: AtomicU64::new(0) };
        let looks = [(0, 0, 7), (1, 0, 300), (1, 0, 550), (1, 1, 800), (1, 1, 900), (2, 1, 901)];
        assert_eq!(looks.map(|(started, done, now)| change.look_at(started, done, now)), [7, 0, 250, 0, 100, 0]);
    }

    #[test]
    fn a_snapshot_shows_what_was_written() {
        let p = Progress::new(&Secret::new([1; 32]), 0);
        assert_eq!(p.snapshot(), Snapshot::default());
        let call = Header { seq: 4, count: 9, algorithm: Header::NO_ALGORITHM, ..Header::default() };
        p.start(&call);
        p.wait_on(Some(3));
        let snapshot = p.snapshot();
        let made = snapshot.call.unwrap();
        assert!(made.header(0).agrees_with(&call), "{made:?}");
        let expected = Snapshot { seq_started: 4, waiting_on: Some(3), call: Some(made), ..Snapshot::default() };
        assert_eq!(snapshot, expected);
        p.done(4);
        p.closed.store(true, Relaxed);
        assert_eq!(p.snapshot(), Snapshot { seq_done: 4, waiting_on: None, closed: true, ..expected });
        assert_eq!((p.unsent(), p.unsent()), (vec![made], vec![]));
    }
}
