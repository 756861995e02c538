//! Numbers of communicators: every rank gives out its own, so that no two communicators of a world have the same.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::lock;

/// Numbers that a rank remembers: only messages about a stuck call use them.
const REMEMBERED: usize = 32;

/// One rank's numbers. That of the world is 0.
pub(crate) struct Numbers {
    rank: u32,
    ranks: u32,
    given: AtomicU32,
    known: Mutex<VecDeque<u32>>,
}

impl Numbers {
    pub(crate) fn new(rank: usize, ranks: usize) -> Numbers {
        let known = Mutex::new(VecDeque::from([0]));
        Numbers { rank: rank as u32, ranks: ranks as u32, given: AtomicU32::new(0), known }
    }

    /// A number that no rank of the world has given out before: a multiple of the number of ranks, plus our rank.
    pub(crate) fn give(&self) -> Result<u32> {
        let used_up = || {
            let given = self.given.load(Ordering::Relaxed);
            let detail = format!("rank {}: {given} splits of {} ranks use up all numbers", self.rank, self.ranks);
            Error::invalid("split", detail)
        };
        let turn = self.given.fetch_add(1, Ordering::Relaxed).checked_add(1);
        turn.and_then(|turn| turn.checked_mul(self.ranks)?.checked_add(self.rank)).ok_or_else(used_up)
    }

    /// These communicators were made.
    pub(crate) fn note(&self, numbers: impl Iterator<Item = u32>) {
        let mut known = lock(&self.known);
        for number in numbers {
            if known.len() == REMEMBERED {
                known.pop_front();
            }
            known.push_back(number);
        }
    }

    /// The communicators that were made last.
    pub(crate) fn known(&self) -> Vec<u32> {
        lock(&self.known).iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_given_twice_and_none_wraps() {
        let ranks: Vec<Numbers> = (0..3).map(|rank| Numbers::new(rank, 3)).collect();
        let mut given: Vec<u32> = (0..9).map(|turn| ranks[turn % 3].give().unwrap()).collect();
        given.sort_unstable();
        assert_eq!(given, (3..12).collect::<Vec<_>>());
        ranks[2].given.store(u32::MAX / 3 - 1, Ordering::Relaxed);
        assert!(ranks[2].give().unwrap_err().to_string().contains("use up"));
    }

    #[test]
    fn the_last_ones_are_remembered() {
        let numbers = Numbers::new(0, 2);
        assert_eq!(numbers.known(), [0]);
        numbers.note(2..100);
        assert_eq!(numbers.known(), (68..100).collect::<Vec<_>>());
    }
}
