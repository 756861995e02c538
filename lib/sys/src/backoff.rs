//! Phases of a wait: it spins, then gives the core away, then sleeps.

use std::time::Duration;

use crate::sync::yield_now;

/// Longest sleep before flags that wake no sleeper are checked again.
pub const SLICE: Duration = Duration::from_millis(50);

/// Shortest sleep where nothing wakes the sleeper.
const NAP: Duration = Duration::from_micros(20);

/// Activity of a thread while it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Looks again and again.
    #[default]
    Spin,
    /// Gives the core away between looks.
    Yield,
    /// Sleeps until it is woken.
    Sleep,
}

impl Phase {
    /// Names the activity in a word, for traces.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Spin => "spin",
            Phase::Yield => "yield",
            Phase::Sleep => "sleep",
        }
    }
}

/// Lengths of the phases before the sleep.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    /// Time of busy iterations, which come first.
    pub spin: Duration,
    /// Time of iterations that give the core away, which come next.
    pub yields: Duration,
}

impl Backoff {
    /// Spends one iteration of a wait that has lasted for `waited`. In [`Phase::Sleep`] it returns at once, and the
    /// caller sleeps.
    #[inline]
    pub fn pause(self, waited: Duration) -> Phase {
        if waited < self.spin {
            std::hint::spin_loop();
            Phase::Spin
        } else if waited < self.spin + self.yields {
            yield_now();
            Phase::Yield
        } else {
            Phase::Sleep
        }
    }

    /// [`Backoff::pause`] for a wait that nothing wakes: it sleeps for a sixteenth of the time so far, `longest` at
    /// most.
    pub fn nap(self, waited: Duration, longest: Duration) {
        if self.pause(waited) == Phase::Sleep {
            std::thread::sleep((waited / 16).clamp(NAP, longest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_spins_then_yields_then_sleeps() {
        let backoff = Backoff { spin: Duration::from_millis(2), yields: Duration::from_millis(3) };
        let phases = [0, 1, 2, 4, 5, 60].map(|ms| backoff.pause(Duration::from_millis(ms)));
        assert_eq!(phases, [Phase::Spin, Phase::Spin, Phase::Yield, Phase::Yield, Phase::Sleep, Phase::Sleep]);
        let none = Backoff { spin: Duration::ZERO, yields: Duration::ZERO };
        assert_eq!(none.pause(Duration::ZERO), Phase::Sleep);
    }
}
