//! The thread of a relay: moves the messages of all its junctions.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::junction::{Junction, Moved};
use tinynccl_plan::error::Result;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::threads::{Thread, lock, poll};

/// Time for which the thread looks again before it sleeps: the answer to a message is often close. It yields its core
/// meanwhile, since the rank that it belongs to, and often its peers, want to compute.
const YIELD: Duration = Duration::from_micros(30);
/// Longest sleep before the peers are looked after.
const SLICE: Duration = Duration::from_millis(500);
/// Longest time for the notices to the ends when the relay leaves.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Counts of what a rank has relayed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Relayed links that stand now.
    pub links: u64,
    /// Messages that went through, of both directions and all links so far.
    pub messages: u64,
    /// Their payload in bytes.
    pub bytes: u64,
}

/// State shared by the relay's thread and the endpoint's other threads.
#[derive(Debug)]
struct State {
    bell: Arc<Doorbell>,
    /// Junctions that the thread has not taken yet.
    new: Mutex<Vec<Junction>>,
    links: AtomicU64,
    messages: AtomicU64,
    bytes: AtomicU64,
    stop: AtomicBool,
    /// Iterations of the thread's loop.
    #[cfg(test)]
    turns: AtomicU64,
}

/// A relay's thread. Dropping it notifies the ends and stops the thread, within [`LAST_WORDS`].
#[derive(Debug)]
pub(crate) struct Forwarder {
    state: Arc<State>,
    thread: Thread,
}

impl Forwarder {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::Os`](tinynccl_plan::Error::Os) when there are no descriptors or threads left.
    pub(crate) fn start(rank: usize) -> Result<Forwarder> {
        let state = Arc::new(State {
            bell: Doorbell::new()?,
            new: Mutex::default(),
            links: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            #[cfg(test)]
            turns: AtomicU64::new(0),
        });
        let thread = Loop { rank, state: state.clone(), junctions: Vec::new() };
        let what = format!("the thread of relay {rank}");
        let thread = Thread::start("relay", format!("tinynccl-relay-{rank}"), what, move || thread.run())?;
        Ok(Forwarder { state, thread })
    }

    /// Doorbell that the links of its junctions must ring.
    pub(crate) fn bell(&self) -> &Arc<Doorbell> {
        &self.state.bell
    }

    /// Takes care of a junction from now on.
    pub(crate) fn add(&self, junction: Junction) {
        self.state.links.fetch_add(1, Ordering::Relaxed);
        lock(&self.state.new).push(junction);
        self.state.bell.ring();
    }

    /// Counts of what has gone through so far.
    pub(crate) fn traffic(&self) -> Traffic {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let State { links, messages, bytes, .. } = &*self.state;
        Traffic { links: load(links), messages: load(messages), bytes: load(bytes) }
    }
}

#[cfg(test)]
impl Forwarder {
    /// Iterations of the thread's loop so far.
    pub(super) fn turns(&self) -> u64 {
        self.state.turns.load(Ordering::Relaxed)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        self.state.bell.ring();
        self.thread.join();
    }
}

struct Loop {
    rank: usize,
    state: Arc<State>,
    junctions: Vec<Junction>,
}

impl Loop {
    fn run(mut self) {
        let mut idle: Option<Instant> = None;
        while !self.state.stop.load(Ordering::Acquire) {
            #[cfg(test)]
            self.state.turns.fetch_add(1, Ordering::Relaxed);
            self.take_new();
            if self.turn() {
                idle = None;
            } else if idle.get_or_insert_with(Instant::now).elapsed() < YIELD && !self.junctions.is_empty() {
                std::thread::yield_now();
            } else if self.sleep(SLICE) {
                idle = None;
            }
        }
        self.take_new();
        self.say_goodbye();
    }

    fn take_new(&mut self) {
        self.junctions.append(&mut lock(&self.state.new));
    }

    /// Advances each junction once; true when anything moved.
    fn turn(&mut self) -> bool {
        let mut sum = Moved::default();
        for junction in &mut self.junctions {
            let Moved { any, messages, bytes } = junction.advance();
            sum = Moved { any: sum.any | any, messages: sum.messages + messages, bytes: sum.bytes + bytes };
        }
        self.state.messages.fetch_add(sum.messages, Ordering::Relaxed);
        self.state.bytes.fetch_add(sum.bytes, Ordering::Relaxed);
        let rank = self.rank;
        self.junctions.retain(|junction| {
            let over = junction.is_over();
            if over {
                let [low, high] = junction.ends();
                log::debug!("rank {rank}: a link between rank {low} and rank {high} is over");
                self.state.links.fetch_sub(1, Ordering::Relaxed);
            }
            !over
        });
        sum.any
    }

    /// Sleeps until a link wakes it, at most for `time`; false when nothing did.
    fn sleep(&mut self, time: Duration) -> bool {
        let mut interests = Vec::new();
        let ready = self.junctions.iter_mut().fold(false, |ready, junction| junction.arm(&mut interests) | ready);
        let mut woken = ready;
        if !ready {
            let mut fds = vec![PollFd::new(&*self.state.bell, PollFlags::IN)];
            for interest in interests {
                let Some(fd) = interest.fd else { continue };
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, interest.readable);
                flags.set(PollFlags::OUT, interest.writable);
                // SAFETY: the descriptor belongs to a link of a junction that we hold, and none is dropped before the
                // poll is over.
                fds.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, flags));
            }
            // Without junctions only the doorbell counts.
            let time = if self.junctions.is_empty() { Duration::from_secs(3600) } else { time };
            match poll(&mut fds, time) {
                Ok(n) => woken = n > 0,
                Err(e) => {
                    log::error!("rank {}: the relay cannot poll: {e}", self.rank);
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        self.junctions.iter_mut().for_each(|junction| junction.disarm(!ready));
        self.state.bell.drain();
        woken
    }

    /// Notifies the ends that the relay leaves.
    fn say_goodbye(&mut self) {
        self.junctions.iter_mut().for_each(Junction::leave);
        let until = Instant::now() + LAST_WORDS;
        while !self.junctions.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                log::warn!("rank {}: {} relayed links are closed without a word", self.rank, self.junctions.len());
                return;
            }
            if !self.turn() {
                self.sleep(left);
            }
        }
    }
}
