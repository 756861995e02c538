//! Threads that spin on one core. The kernel lets each of two have it for milliseconds in turn, also while other cores
//! are free: it looks for a free one when a thread wakes, and these never sleep. So one that finds this sleeps once.

use std::time::{Duration, Instant};

/// A call that waits for nothing takes so long only where another thread has the core: a kernel's slice is 3 ms.
const AWAY: Duration = Duration::from_millis(1);
/// A call that may sleep has slept if it took so long.
const ASLEEP: Duration = Duration::from_micros(10);
/// How long a thread sleeps to be woken elsewhere.
const NAP: Duration = Duration::from_micros(50);

/// Whether a thread that spins shares its core.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    shared: bool,
}

impl Crowd {
    /// A call of this thread's to the kernel, which may sleep for so long.
    pub(super) fn watch<T>(&mut self, may_sleep: Duration, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = call();
        self.took(begin.elapsed(), may_sleep);
        result
    }

    fn took(&mut self, time: Duration, may_sleep: Duration) {
        if may_sleep.is_zero() {
            self.shared |= time >= AWAY;
        } else {
            self.shared &= time < ASLEEP;
        }
    }

    /// How long a thread that would spin should sleep.
    pub(super) fn nap(&self) -> Duration {
        if self.shared { NAP } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_was_away_while_it_spun_sleeps_once() {
        let (spin, slice, zero) = (Duration::from_micros(2), Duration::from_millis(3), Duration::ZERO);
        let mut crowd = Crowd::default();
        crowd.took(spin, zero);
        assert_eq!(crowd.nap(), zero);
        crowd.took(slice, zero);
        crowd.took(spin, zero);
        assert_eq!(crowd.nap(), NAP, "until it has slept");
        // There was something to do at once.
        crowd.took(spin, NAP);
        assert_eq!(crowd.nap(), NAP);
        crowd.took(NAP, NAP);
        assert_eq!(crowd.nap(), zero);
        crowd.took(slice, slice);
        assert_eq!(crowd.nap(), zero, "it was asleep");
    }
}
