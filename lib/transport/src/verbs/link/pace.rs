//! Rates at which the queue pairs of a link carry their stripes, and the weights that follow from them.
//!
//! ```text
//! queue pair 0   posted |=====| completed           busy from when it was posted, or the one before it completed,
//! queue pair 1   posted |===========| completed     to when its completion is seen
//! ```
//! Over a window of messages that all queue pairs share: bytes over time is a queue pair's rate, and its weight from
//! then on. Completions that are seen at the same time, because no thread looked before, give rates in proportion to
//! the bytes: the cut stays as it is. Queue pairs whose rates differ little (and noise is little) are weighed alike,
//! which is the even cut.

use std::time::{Duration, Instant};

/// Stripes of each queue pair that a decision is made on.
const WINDOW: u32 = 32;
/// Rates within this factor of each other are equal: software devices and busy cores differ so much by chance.
const ALIKE: f64 = 1.5;
/// A new cut must differ by this factor from the one there is, for one queue pair at least.
const WORTH_IT: f64 = 1.2;
/// Weights are parts of about this number.
const PARTS: f64 = 1000.0;
/// A queue pair keeps this share of the fastest one's weight: without stripes it would never be measured again.
const LEAST: f64 = 0.05;

/// One queue pair.
#[derive(Debug, Clone, Copy, Default)]
struct Meter {
    /// The stripe that is being measured: its request, its bytes, and when it was posted.
    open: Option<(u64, usize, Instant)>,
    /// Time at which the last completion was seen.
    idle_since: Option<Instant>,
    /// Stripes completed in this window, their bytes, and the time that they took.
    stripes: u32,
    bytes: usize,
    busy: Duration,
}

/// All queue pairs of a link.
#[derive(Debug)]
pub(super) struct Pace {
    meters: Vec<Meter>,
    weights: Vec<u32>,
}

impl Pace {
    pub(super) fn new(qps: usize) -> Pace {
        Pace { meters: vec![Meter::default(); qps], weights: vec![1; qps] }
    }

    /// Request `number` of a queue pair has been posted, with a stripe of `bytes`. One at a time is measured.
    pub(super) fn posted(&mut self, qp: usize, number: u64, bytes: usize, now: Instant) {
        if let Some(meter) = self.meters.get_mut(qp).filter(|meter| meter.open.is_none()) {
            meter.open = Some((number, bytes, now));
        }
    }

    /// Returns true while a stripe of this queue pair is being measured.
    #[inline]
    pub(super) fn is_open(&self, qp: usize) -> bool {
        self.meters.get(qp).is_some_and(|meter| meter.open.is_some())
    }

    /// Request `number` of a queue pair, and all before it, have completed. Returns new weights when the window is full
    /// and they differ.
    pub(super) fn completed(&mut self, qp: usize, number: u64, now: Instant) -> Option<&[u32]> {
        let meter = self.meters.get_mut(qp)?;
        let (wanted, bytes, posted) = meter.open?;
        if number < wanted {
            meter.idle_since = Some(now);
            return None;
        }
        meter.open = None;
        let begin = meter.idle_since.replace(now).map_or(posted, |idle| idle.max(posted));
        meter.stripes += 1;
        meter.bytes += bytes;
        meter.busy += now.saturating_duration_since(begin);
        if self.meters.iter().any(|meter| meter.stripes < WINDOW) {
            return None;
        }
        let rate = |meter: &Meter| meter.bytes as f64 / meter.busy.as_secs_f64().max(1e-9);
        let weights = weights(&self.meters.iter().map(rate).collect::<Vec<_>>());
        self.meters.iter_mut().for_each(|meter| (meter.stripes, meter.bytes, meter.busy) = (0, 0, Duration::ZERO));
        differ(&self.weights, &weights).then(|| {
            self.weights = weights;
            &self.weights[..]
        })
    }
}

/// In proportion to the rates; 1 for all where they are alike.
fn weights(rates: &[f64]) -> Vec<u32> {
    let fastest = rates.iter().copied().fold(0.0, f64::max);
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    if fastest <= slowest * ALIKE {
        return vec![1; rates.len()];
    }
    rates.iter().map(|rate| ((rate / fastest).max(LEAST) * PARTS).round() as u32).collect()
}

/// Returns true if one queue pair's share would change by enough.
fn differ(old: &[u32], new: &[u32]) -> bool {
    let share = |all: &[u32], of: u32| f64::from(of) / all.iter().map(|w| f64::from(*w)).sum::<f64>().max(1.0);
    old.iter().zip(new).any(|(&a, &b)| {
        let change = share(new, b) / share(old, a);
        !(1.0 / WORTH_IT..=WORTH_IT).contains(&change)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::stripes::Stripes;
    use proptest::prelude::*;

    /// Sends `messages` messages of 1 MiB, one after the other, over queue pairs that carry `rates` bytes per µs; each
    /// completion is seen when the sender looks, every `look` µs. Returns the stripes at the end.
    fn run(rates: &[f64], messages: u64, look: u64) -> Stripes {
        let (len, start) = (1 << 20, Instant::now());
        let mut stripes = Stripes::new(rates.len());
        let mut pace = Pace::new(rates.len());
        let mut now = start;
        for number in 1..=messages {
            let mut ends: Vec<(Instant, usize)> = Vec::new();
            for (qp, rate) in rates.iter().enumerate() {
                let bytes = stripes.range(len, qp).len();
                pace.posted(qp, number, bytes, now);
                ends.push((now + Duration::from_nanos((bytes as f64 / rate * 1000.0) as u64), qp));
            }
            ends.sort();
            for (end, qp) in ends {
                let seen = (end - start).as_micros() as u64 / look * look + look;
                now = start + Duration::from_micros(seen);
                if let Some(weights) = pace.completed(qp, number, now) {
                    stripes.weigh(weights);
                }
            }
        }
        stripes
    }

    #[test]
    fn a_slow_rail_gets_less_until_both_are_ready_at_the_same_time() {
        let stripes = run(&[3000.0, 1000.0], 4 * u64::from(WINDOW), 1);
        let share = stripes.range(1 << 20, 0).len() as f64 / f64::from(1 << 20);
        assert!((0.73..0.77).contains(&share), "{share}");
    }

    #[test]
    fn rails_that_are_alike_or_looked_at_late_keep_the_even_cut() {
        assert_eq!(run(&[1000.0, 1300.0, 1100.0], 1000, 1), Stripes::new(3));
        // Every completion is seen at the same time.
        assert_eq!(run(&[3000.0, 1000.0], 1000, 1_000_000), Stripes::new(2));
    }

    #[test]
    fn a_rail_that_recovers_gets_its_share_back() {
        let mut pace = Pace::new(2);
        let start = Instant::now();
        let mut last = Vec::new();
        for (number, slow) in (1..).zip([10u64; 192].into_iter().chain([1; 192])) {
            let at = start + Duration::from_millis(20 * number);
            for (qp, took) in [(0, 1), (1, slow)] {
                pace.posted(qp, number, 100_000, at);
                if let Some(weights) = pace.completed(qp, number, at + Duration::from_millis(took)) {
                    last.push(weights.to_vec());
                }
            }
        }
        assert_eq!(last, [vec![1000, 100], vec![1, 1]]);
    }

    proptest! {
        #[test]
        fn any_rates_give_weights_that_leave_nobody_out(rates in proptest::collection::vec(0.0f64..1e12, 1..=16)) {
            let weights = weights(&rates);
            prop_assert_eq!(weights.len(), rates.len());
            prop_assert!(weights.iter().all(|w| (1..=1000).contains(w)));
        }
    }
}
