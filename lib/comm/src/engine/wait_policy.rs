//! Durations of spinning, yielding and sleeping before a call gives up.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::Inner;
use crate::executor::WaitPolicy;
use tinynccl_sys::backoff::Backoff;

/// Longest spinning on a shared core.
const SHARED_SPIN: Duration = Duration::from_micros(2);

impl Inner {
    /// True if a waiting call may keep a core from the caller's computation, or from the rank that it waits for.
    #[inline]
    fn shares_core(&self, background: bool) -> bool {
        background || self.oversubscribed.load(Ordering::Relaxed)
    }

    /// Returns how long a wait spins, yields and sleeps; shorter on a core that others need.
    pub fn wait_policy(&self, background: bool) -> WaitPolicy {
        let config = &self.state.config;
        // A rank that shares a core spins just long enough for a peer that is already in the same call.
        let (spin, turns) =
            if self.shares_core(background) { (config.spin.min(SHARED_SPIN), 2) } else { (config.spin, 32) };
        let yields = if background { Duration::from_micros(20) } else { Duration::from_micros(200) };
        WaitPolicy { turns, backoff: Backoff { spin, yields }, deadline: config.timeout }
    }

    /// [`Inner::wait_policy`] for the shared region, where one poll costs a few loads and no system call.
    pub(super) fn board_wait_policy(&self, background: bool) -> WaitPolicy {
        let config = &self.state.config;
        let (spin, turns) = match self.shares_core(background) {
            // The awaited rank may need this core.
            true => (Duration::ZERO, 4),
            false => (config.spin, 64),
        };
        let yields = if background { Duration::from_micros(20) } else { Duration::from_micros(500) };
        WaitPolicy { turns, backoff: Backoff { spin, yields }, deadline: config.timeout }
    }

    /// Polls of a short receive for its message before it waits as other calls do.
    pub(super) fn quick_turns(&self, background: bool) -> u32 {
        if self.shares_core(background) { 1 } else { 256 }
    }
}
