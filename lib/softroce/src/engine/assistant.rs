//! A second thread that receives, where a host's processors allow and much comes in by the last receive queue.
//!
//! Receiving is the longest of a message's three passes over memory: out of the socket, through the checksum, to where
//! it belongs. The receive queues of a slot (`LANES`) are sockets with separate receiving sides, so two threads can do
//! it at the same time. All packets of a connection come by one receive queue: their order stays. While little comes in
//! this thread sleeps, and the engine's thread, or a program that polls, takes the packets of all receive queues.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;

use super::polling::EXPECTED;
use super::{Shared, now};

/// Index of the receive queue that the assistant takes.
const LANE: usize = super::slot::LANES - 1;

#[derive(Default)]
pub(super) struct Assistant {
    thread: OnceLock<Thread>,
    /// Time until which the assistant expects more packets, in nanoseconds of the monotonic clock.
    until: AtomicU64,
    /// True while the assistant receives: the engine's thread leaves the receive queue to it.
    awake: AtomicBool,
}

impl Assistant {
    /// Wakes the assistant if many bytes came by its receive queue `lane`, for it expects more.
    pub(super) fn expect(&self, lane: usize) {
        if lane != LANE {
            return;
        }
        self.until.store(now() + EXPECTED, Ordering::Relaxed);
        if !self.awake.load(Ordering::Acquire)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Returns true while the assistant is awake and `lane` is the receive queue that it takes.
    pub(super) fn has(&self, lane: usize) -> bool {
        lane == LANE && self.awake.load(Ordering::Acquire)
    }
}

/// Runs until `stop` is set.
pub(super) fn assist(shared: &Shared) {
    let assistant = &shared.assistant;
    let _ = assistant.thread.set(std::thread::current());
    while !shared.stop.load(Ordering::Acquire) {
        if now() >= assistant.until.load(Ordering::Relaxed) {
            // From here on the engine's thread takes what comes, and wakes this one if it is much.
            assistant.awake.store(false, Ordering::Release);
            std::thread::park();
            continue;
        }
        assistant.awake.store(true, Ordering::Release);
        for (socket, _) in shared.listeners.iter().enumerate().filter(|(_, listener)| listener.lane == LANE) {
            if let Some(mut receiving) = shared.try_receiving(Some(socket)) {
                receiving.waits = false;
                shared.receive_locked(&mut receiving, Some(socket));
            }
        }
    }
}
