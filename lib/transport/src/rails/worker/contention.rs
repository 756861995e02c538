//! Core contention of threads that spin. The kernel lets each of two that share a core have it for milliseconds in
//! turn, also while other cores are free: it looks for a free one when a thread wakes, and these never sleep. So a
//! thread that detects this sleeps once.

use std::time::{Duration, Instant};

/// A call that waits for nothing takes this long only where another thread has the core: a kernel's time slice is 3 ms.
const PREEMPTED: Duration = Duration::from_millis(1);
/// A call that may sleep has slept if it took at least this long.
const ASLEEP: Duration = Duration::from_micros(10);
/// Length of the sleep after which the kernel wakes a thread on another core.
const SLEEP: Duration = Duration::from_micros(50);

/// Core contention of one spinning thread: true from a call that took too long until the thread has slept.
#[derive(Debug, Default)]
pub(in crate::rails) struct Contention {
    shared: bool,
}

impl Contention {
    /// Runs a system call of this thread, which may sleep for up to `may_sleep`, and updates the contention state by
    /// its duration.
    pub(in crate::rails) fn measure<T>(&mut self, may_sleep: Duration, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = call();
        self.record(begin.elapsed(), may_sleep);
        result
    }

    fn record(&mut self, time: Duration, may_sleep: Duration) {
        if may_sleep.is_zero() {
            self.shared |= time >= PREEMPTED;
        } else {
            self.shared &= time < ASLEEP;
        }
    }

    /// Time for which a thread that would spin should sleep; zero without core contention.
    pub(in crate::rails) fn sleep(&self) -> Duration {
        if self.shared { SLEEP } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_was_away_while_it_spun_sleeps_once() {
        let (spin, slice, zero) = (Duration::from_micros(2), Duration::from_millis(3), Duration::ZERO);
        let mut contention = Contention::default();
        contention.record(spin, zero);
        assert_eq!(contention.sleep(), zero);
        contention.record(slice, zero);
        contention.record(spin, zero);
        assert_eq!(contention.sleep(), SLEEP, "until it has slept");
        // There was something to do at once.
        contention.record(spin, SLEEP);
        assert_eq!(contention.sleep(), SLEEP);
        contention.record(SLEEP, SLEEP);
        assert_eq!(contention.sleep(), zero);
        contention.record(slice, slice);
        assert_eq!(contention.sleep(), zero, "it was asleep");
    }
}
