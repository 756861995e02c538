//! The fence between "I sleep" and "there is something for you".
//!
//! Waker: store the message, fence, load the waiting flag. Sleeper: store the waiting flag, fence, look for a message.
//! With a full fence on both sides (Dekker) at least one of them sees the other; with one of them missing both may look
//! too early, and the sleeper is not woken.
//!
//! Until 2026-11-23 the waker had no fence, and the sleeper made up for it by `membarrier(2)`. Linux passes over a core
//! that idles with the process's memory still loaded while the process registers: there the waker's fence was really
//! missing. The fence costs a call nothing that can be measured, because the next thing that a waker does is to wait
//! for its peer. Both findings: `docs/benchmarks/2026-11-23-fences.md`, and the book's page "A fence that the kernel
//! forgot".

use std::sync::atomic::Ordering;

use tinynccl_sys::sync::{Step, fence, order};

/// Between a store that may be awaited and the look whether somebody sleeps.
#[inline(always)]
pub fn of_waker() {
    fence(order(Step::WakerFence, Ordering::SeqCst));
}

/// Between asking to be woken and the last look for what is awaited.
#[inline(always)]
pub fn of_sleeper() {
    fence(order(Step::SleeperFence, Ordering::SeqCst));
}
