//! Prices from measured times.
//!
//! | figure | how it is measured |
//! | --- | --- |
//! | alpha, call | T1: a call with one round trip of a message; Tk: one with k round trips. `Tk = call + 2k·alpha` |
//! | beta | both ranks send and receive F/2 bytes at once, in messages of m bytes: `T = F/2 · (alpha/m + beta)` |
//! | delta | one rank copies its own buffer |
//! | gamma | one rank combines two of its own buffers; the time of a copy is subtracted |
//! | c | the copy again, by two ranks at once |
//!
//! The last four are measured at three footprints: half of L2, a part of L3, more than L3. Some bytes of a footprint
//! beyond a cache are still in the cache ([`Caches::shares`]), so the rates are computed one after the other, the
//! nearest first.

use super::rates::{Caches, Rates};

/// Bounds on time per byte: 10,000 GB/s to 1 kB/s.
const PER_BYTE: (f64, f64) = (1e-4, 1e6);
/// Bounds on a time: 1 ns to 1 s.
const TIME: (f64, f64) = (1.0, 1e9);

/// The lower quartile of the valid times; `None` without any. Disturbances only lengthen a measurement, but the
/// shortest one may be an outlier.
pub fn typical(times: &[f64]) -> Option<f64> {
    let sorted = sane(times);
    sorted.get(sorted.len() / 4).copied()
}

/// Returns true if most times are less than twice the typical one, so that the measurement is repeatable.
pub fn is_steady(times: &[f64]) -> bool {
    let sorted = sane(times);
    sorted.get(sorted.len() / 4).zip(sorted.get(sorted.len() / 2)).is_some_and(|(low, median)| *median < 2.0 * low)
}

fn sane(times: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = times.iter().copied().filter(|ns| ns.is_finite() && *ns > 0.0).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// `(alpha, call)` from the times of calls with one round trip and with `rounds` (2 or more).
pub fn latency(once: f64, many: f64, rounds: usize) -> (f64, f64) {
    let extra = 2.0 * (rounds.max(2) - 1) as f64;
    // Each hop takes some time, and no more than if the call itself took none.
    let alpha = ((many - once) / extra).max(many / (4.0 * rounds.max(2) as f64)).min(once / 2.0);
    let call = (once - 2.0 * alpha).max(0.0);
    (six_digits(alpha.clamp(TIME.0, TIME.1)), six_digits(call.clamp(0.0, TIME.1)))
}

/// One measured time per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Bytes that each rank touched.
    pub footprint: f64,
    /// Ranks that did so at once.
    pub ranks: f64,
    /// The measured time.
    pub ns_per_byte: f64,
}

/// Rates from points in L2, in L3 and beyond. Levels without a point keep the proportion of `built_in`.
///
/// `crowding`: how much longer memory took while the last point was measured than it takes a rank alone.
pub fn rates(points: [Option<Point>; 3], caches: &Caches, crowding: f64, built_in: &Rates) -> Rates {
    let clamp = |value: f64| value.clamp(PER_BYTE.0, PER_BYTE.1);
    let [l2, l3, memory] = points;
    let shares = |point: &Point| caches.shares(point.footprint, point.ranks);
    // Without the first point there is no basis.
    let Some(l2) = l2.map(|point| clamp(point.ns_per_byte)) else { return *built_in };
    let l3 = l3.and_then(|point| {
        let share = shares(&point);
        (share.l3 > 0.1).then(|| clamp((point.ns_per_byte - share.l2 * l2) / (share.l3 + share.memory)))
    });
    let l3 = l3.unwrap_or(l2 * built_in.l3 / built_in.l2).max(l2);
    let memory = memory.and_then(|point| {
        let share = shares(&point);
        let beyond = (point.ns_per_byte - share.l2 * l2 - share.l3 * l3) / share.memory;
        (share.memory > 0.1).then(|| clamp(beyond / crowding.max(1.0)))
    });
    let memory = memory.unwrap_or(l3 * built_in.memory / built_in.l3);
    let Rates { l2, l3, memory } = Rates::new(l2, l3, memory);
    Rates::new(six_digits(l2), six_digits(l3), six_digits(clamp(memory)))
}

/// `total` minus `part`, level by level.
pub fn beyond(total: Rates, part: Rates) -> Rates {
    let left = |a: f64, b: f64| six_digits((a - b).clamp(0.0, PER_BYTE.1));
    Rates::new(left(total.l2, part.l2), left(total.l3, part.l3), left(total.memory, part.memory))
}

/// Factor by which two ranks at once slow each other down, 1 to 2; 1 if the times give none.
pub fn contention(alone: f64, together: f64) -> f64 {
    let factor = together / alone;
    if factor.is_finite() { six_digits(factor.clamp(1.0, 2.0)) } else { 1.0 }
}

/// Rounded so that it survives JSON; a millionth of a nanosecond is nothing.
fn six_digits(value: f64) -> f64 {
    if value.abs() < 1e-6 { 0.0 } else { format!("{value:.5e}").parse().unwrap_or(value) }
}

#[cfg(test)]
mod tests {
    use approx::{assert_abs_diff_eq, assert_relative_eq};
    use proptest::prelude::*;

    use super::super::CostModel;
    use super::*;

    const CACHES: Caches = Caches { l2: 1 << 20, l3: 16 << 20 };

    #[test]
    fn descheduled_measurements_are_passed_over() {
        assert_eq!(typical(&[101.0, 4e6, 100.0, f64::NAN, 99.0, -1.0]), Some(100.0));
        assert_eq!(typical(&[f64::INFINITY, 0.0]), None);
        assert!(is_steady(&[100.0, 110.0, 4e6]) && !is_steady(&[100.0, 210.0, 220.0]) && !is_steady(&[]));
    }

    #[test]
    fn latency_and_call_are_told_apart() {
        assert_eq!(latency(60.0 + 2.0 * 100.0, 60.0 + 32.0 * 100.0, 16), (100.0, 60.0));
        // More trips took less time: noise. No figure may be negative or zero.
        let (alpha, call) = latency(1000.0, 500.0, 16);
        assert!(alpha > 0.0 && call >= 0.0);
        assert_eq!(latency(200.0, 16.0 * 200.0, 16), (100.0, 0.0));
    }

    #[test]
    fn exact_points_give_the_rates_back() {
        let truth = Rates::new(0.05, 0.08, 0.2);
        let point = |footprint: usize, ranks: f64| {
            let (footprint, crowding) = (footprint as f64, if ranks > 1.0 { 1.5 } else { 1.0 });
            let ns_per_byte = truth.at(CACHES.shares(footprint, ranks), crowding);
            Some(Point { footprint, ranks, ns_per_byte })
        };
        for (ranks, crowding) in [(1.0, 1.0), (2.0, 1.5)] {
            let points = [point(512 << 10, ranks), point(6 << 20, ranks), point(48 << 20, ranks)];
            let rates = rates(points, &CACHES, crowding, &CostModel::shm().copy);
            for (a, b) in [(rates.l2, truth.l2), (rates.l3, truth.l3), (rates.memory, truth.memory)] {
                assert_relative_eq!(a, b, max_relative = 1e-4);
            }
        }
    }

    #[test]
    fn what_was_not_measured_keeps_the_built_in_proportions() {
        let built_in = Rates::new(0.1, 0.2, 0.5);
        let l2 = Some(Point { footprint: 1e5, ranks: 2.0, ns_per_byte: 0.05 });
        assert_eq!(rates([l2, None, None], &CACHES, 1.0, &built_in), Rates::new(0.05, 0.1, 0.25));
        assert_eq!(rates([None; 3], &CACHES, 1.0, &built_in), built_in);
    }

    #[test]
    fn combining_is_what_comes_on_top_of_copying() {
        let left = beyond(Rates::new(0.06, 0.08, 0.3), Rates::new(0.04, 0.1, 0.2));
        assert_eq!((left.l2, left.l3), (0.02, 0.02), "never less than nearer");
        assert_abs_diff_eq!(left.memory, 0.1, epsilon = 1e-9);
    }

    proptest! {
        #[test]
        fn garbage_gives_figures_that_pass_the_check_and_survive_json(
            times in proptest::collection::vec(any::<f64>(), 14), rounds in 0usize..100,
            footprints in proptest::collection::vec(0.0f64..1e12, 3), plain in any::<bool>(),
        ) {
            let times: Vec<f64> =
                times.iter().map(|t| if plain { t.abs() % 1e9 } else { *t }).map(|t| typical(&[t]).unwrap_or(1.0)).collect();
            let built_in = CostModel::shm();
            let (alpha_ns, call_ns) = latency(times[0], times[1], rounds);
            let rate = |i: usize, built_in: &Rates| {
                let point = |k: usize| Some(Point { footprint: footprints[k], ranks: 2.0, ns_per_byte: times[i + k] });
                rates([point(0), point(1), point(2)], &CACHES, times[13], built_in)
            };
            let (beta, copy) = (rate(2, &built_in.shm.beta), rate(5, &built_in.copy));
            let model = CostModel {
                shm: super::super::LinkCost { alpha_ns, beta },
                call_ns,
                copy,
                reduce: beyond(rate(8, &built_in.copy), copy),
                contention: contention(times[11], times[12]),
                ..built_in
            };
            prop_assert_eq!(model.check(), Ok(()));
            let text = serde_json::to_string(&model).unwrap();
            prop_assert_eq!(serde_json::from_str::<CostModel>(&text).unwrap(), model);
        }
    }
}
