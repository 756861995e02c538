//! A clock that stands still but for what the work takes: every number here is chosen, none is measured.

use std::cell::Cell;

use proptest::prelude::*;

use super::*;

/// A clock that work moves on.
struct Hands {
    start: Instant,
    passed: Cell<Duration>,
}

impl Hands {
    fn new() -> Hands {
        Hands { start: Instant::now(), passed: Cell::new(Duration::ZERO) }
    }

    fn now(&self) -> Instant {
        self.start + self.passed.get()
    }

    /// Work of `ns` nanoseconds.
    fn work(&self, ns: f64) -> f64 {
        self.passed.set(self.passed.get() + Duration::from_nanos(ns as u64));
        ns
    }
}

const SLICE: Duration = Duration::from_millis(3);

#[test]
fn nothing_is_started_that_might_not_be_over_in_time() {
    let hands = Hands::new();
    let now = || hands.now();
    let mut clock = Clock::new(&now, hands.now());
    let none = clock.sample(1.0, SAMPLES, SLICE, |_| panic!("there was no time"));
    assert_eq!(none.unwrap(), None);
    assert_eq!(clock.grow(4096, 1 << 20, 1 << 20, |_| panic!("there was no time")).unwrap(), 4096);
    assert!(!clock.steady);
    // An hour per call, as the first one says: no second one.
    let mut clock = Clock::new(&now, hands.now() + Duration::from_secs(5000));
    let mut calls = 0;
    let once = clock.sample(1.0, SAMPLES, SLICE, |n| {
        calls += n;
        Ok((0..n).map(|_| hands.work(3.6e12)).collect())
    });
    assert_eq!((once.unwrap(), calls), (Some(3.6e12), 1));
}

#[test]
fn samples_are_bounded_in_number_and_the_cold_one_does_not_count() {
    let hands = Hands::new();
    let now = || hands.now();
    let mut clock = Clock::new(&now, hands.now() + Duration::from_secs(3600));
    let mut calls = 0;
    let median = clock.sample(1.0, SAMPLES, SLICE, |n| {
        let times = (0..n).map(|i| hands.work(if calls + i == 0 { 1e5 } else { 100.0 })).collect();
        calls += n;
        Ok(times)
    });
    assert_eq!((median.unwrap(), calls, clock.steady), (Some(100.0), SAMPLES, true));
    let mut turn = 0.0;
    let noisy = clock.sample(1.0, SAMPLES, SLICE, |n| {
        let times = (0..n).map(|i| hands.work(2f64.powf(turn + i as f64))).collect();
        turn += n as f64;
        Ok(times)
    });
    assert!(noisy.is_ok() && !clock.steady);
}

#[test]
fn buffers_grow_in_steps_at_the_price_of_the_last() {
    let grow = |ns_per_byte: f64, budget_ms: u64, least: usize| {
        let hands = Hands::new();
        let now = || hands.now();
        let mut clock = Clock::new(&now, hands.now() + Duration::from_millis(budget_ms));
        let (mut have, mut steps) = (128 << 10, vec![]);
        let got = clock.grow(have, 12 << 20, least, |next| {
            assert!(next > have && next - have <= STEP);
            hands.work((next - have) as f64 * ns_per_byte);
            have = next;
            steps.push(next);
            Ok(())
        });
        assert_eq!(got.unwrap(), have);
        (have, steps.len(), clock.steady, hands.passed.get() <= Duration::from_millis(budget_ms))
    };
    // Huge pages: everything, a step per page.
    assert_eq!(grow(0.5, 20, 12 << 20), (12 << 20, 6, true, true));
    // Not begun: not even a step is sure to be over in time.
    assert_eq!(grow(0.5, 5, 12 << 20), (128 << 10, 0, false, true));
    // Slower than expected: it stops on the way, in time.
    let (have, _, steady, in_time) = grow(4.0, 40, 12 << 20);
    assert!(have < 12 << 20 && !steady && in_time, "{have}");
    // Less than everything is of use.
    let (have, _, steady, in_time) = grow(2.0, 28, 9 << 20);
    assert!(((9 << 20)..(12 << 20)).contains(&have) && !steady && in_time, "{have}");
}

#[test]
fn after_a_first_step_there_must_be_time_for_enough_of_them() {
    let grow = |have, price: Option<f64>, left| {
        let touch = price.map_or(GUESS, |ns| Touch { ns, measured: true });
        room(have, 12 << 20, 9 << 20, touch, left)
    };
    assert_eq!(grow(0, None, 9e6), Some(2 << 20));
    assert_eq!(grow(0, None, 8e6), None);
    assert_eq!(grow(2 << 20, Some(1.0), 8e6), Some(4 << 20));
    assert_eq!(grow(2 << 20, Some(1.0), 7e6), None, "7 MiB are missing");
    assert_eq!(grow(10 << 20, Some(1.0), 5e6), Some(12 << 20));
    assert_eq!(grow(10 << 20, Some(1.0), 4e6), None, "a step may take twice as long");
    assert_eq!(grow(12 << 20, Some(1.0), 1e9), None);
}

proptest! {
    /// As long as nothing takes more than twice what the last of its kind took, it is over by the deadline.
    #[test]
    fn the_deadline_is_kept(
        first in 1.0f64..1e7, factors in proptest::collection::vec(0.2f64..2.0, 1..40), budget in 0.0f64..1e8,
        most in 0usize..200, slice in 0u64..10_000_000,
    ) {
        let hands = Hands::new();
        let now = || hands.now();
        let end = hands.now() + Duration::from_nanos(budget as u64);
        let mut clock = Clock::new(&now, end);
        let (mut last, mut turn, mut taken) = (first, 0, 0);
        clock.sample(first, most, Duration::from_nanos(slice), |n| {
            // The calls of a batch are alike; its slowest is what the next batch goes by.
            let each = last * factors[turn % factors.len()];
            (last, turn, taken) = (each, turn + 1, taken + n);
            Ok((0..n).map(|_| hands.work(each)).collect())
        }).unwrap();
        prop_assert!(hands.now() <= end && taken <= most);
        let (mut have, mut price) = (4096, GUESS.ns);
        clock.grow(have, 16 << 20, 16 << 20, |next| {
            price *= factors[turn % factors.len()];
            turn += 1;
            hands.work((next - have) as f64 * price);
            have = next;
            Ok(())
        }).unwrap();
        prop_assert!(hands.now() <= end);
    }
}
