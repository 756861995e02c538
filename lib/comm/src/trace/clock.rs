//! Time stamps, and how far two hosts' clocks are apart.

use rustix::time::{ClockId, clock_gettime};

use tinynccl_plan::error::Result;

/// `CLOCK_MONOTONIC` in nanoseconds: the same clock for all processes of a host.
#[inline]
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Difference to add to our time to get the reference's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClockOffset {
    pub(crate) ns: i64,
    /// The true offset is at most this far away, if neither clock jumped.
    pub(crate) uncertainty_ns: u64,
}

/// Requests the reference's time `rounds` times; the shortest round trip counts (Cristian 1989). The reference looked
/// at its clock at some time between `now()` before and after `ask()`, so the middle is wrong by half the round trip at
/// most, however unequal the two directions were.
pub fn measure(
    rounds: usize,
    mut now: impl FnMut() -> u64,
    mut ask: impl FnMut() -> Result<u64>,
) -> Result<ClockOffset> {
    let mut best = ClockOffset { ns: 0, uncertainty_ns: u64::MAX };
    for _ in 0..rounds {
        let before = now();
        let theirs = ask()?;
        let after = now();
        let half = after.saturating_sub(before).div_ceil(2);
        if half < best.uncertainty_ns {
            best = ClockOffset { ns: theirs as i64 - (before + half) as i64, uncertainty_ns: half };
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// Two clocks with one true time; each direction of a round trip takes as long as `ways` says.
    fn simulate(offset: i64, ways: &[(u64, u64)]) -> ClockOffset {
        let time = Cell::new(1_000_000_000_000u64);
        let mut ways = ways.iter();
        let rounds = ways.len();
        let ask = || {
            let &(there, back) = ways.next().expect("one per round");
            time.set(time.get() + there);
            let theirs = (time.get() as i64 + offset) as u64;
            time.set(time.get() + back);
            Ok(theirs)
        };
        measure(rounds, || time.get(), ask).unwrap()
    }

    #[test]
    fn the_shortest_round_trip_counts() {
        let found = simulate(-123_456_789, &[(9_000, 90_000), (500, 500), (70_000, 600)]);
        assert_eq!(found, ClockOffset { ns: -123_456_789, uncertainty_ns: 500 });
    }

    #[test]
    fn one_way_may_take_all_the_time() {
        let found = simulate(5_000, &[(10_000, 0)]);
        assert_eq!(found, ClockOffset { ns: 10_000, uncertainty_ns: 5_000 });
    }

    proptest! {
        #[test]
        fn the_truth_is_within_the_uncertainty(
            offset in -100_000_000_000i64..100_000_000_000,
            ways in prop::collection::vec((0u64..1_000_000, 0u64..1_000_000), 1..20),
        ) {
            let found = simulate(offset, &ways);
            prop_assert!(found.ns.abs_diff(offset) <= found.uncertainty_ns, "{found:?}");
            let shortest = ways.iter().map(|(a, b)| (a + b).div_ceil(2)).min();
            prop_assert_eq!(Some(found.uncertainty_ns), shortest);
        }
    }
}
