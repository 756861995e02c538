//! A second thread that receives, where a host's processors allow and much comes in by the last lane.
//!
//! Receiving is the longest of a message's three ways through memory: out of the socket, through the checksum, to where
//! it belongs. The lanes of a slot are sockets with receiving sides of their own, so two threads can do it at the same
//! time. All packets of a connection come by one lane: their order stays. While little comes in this thread sleeps, and
//! the engine's thread, or a program that polls, takes the packets of all lanes.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;

use super::polling::EXPECTED;
use super::{Shared, now};

/// The lane that it takes.
const LANE: usize = super::slot::LANES - 1;

#[derive(Default)]
pub(super) struct Assistant {
    thread: OnceLock<Thread>,
    /// Until when more is expected.
    until: AtomicU64,
    /// It is at work: the engine's thread leaves the lane to it.
    awake: AtomicBool,
}

impl Assistant {
    /// Many bytes came by a lane, and more are expected.
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

    /// Whether a lane is left to it.
    pub(super) fn has(&self, lane: usize) -> bool {
        lane == LANE && self.awake.load(Ordering::Acquire)
    }
}

/// Runs until the engine is told to stop.
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
