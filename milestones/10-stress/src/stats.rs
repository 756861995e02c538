//! Medians of measurements.

use serde::Serialize;

/// The time of one call over several repetitions. Each repetition is the mean of its calls on the slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Timing {
    /// Median over the repetitions that count, in seconds. The table shows this one.
    pub(crate) median: f64,
    /// Fastest repetition that counts, in seconds.
    pub(crate) min: f64,
    /// Slowest repetition that counts, in seconds.
    pub(crate) max: f64,
    /// Calls per repetition, back to back.
    pub(crate) iterations: usize,
    /// Repetitions, with a barrier before each.
    pub(crate) repetitions: usize,
    /// Repetitions in which every rank had its core to itself.
    pub(crate) clean: usize,
}

impl Timing {
    /// Summarizes the clean repetitions if there are at least `enough` of them, else all. `None` without any.
    // EXERCISE 2 (How it works): take the clean repetitions if there are enough of them, else all; give median (of an
    // even number the mean of the middle two), fastest and slowest.
    pub(crate) fn of(all: Vec<f64>, clean: Vec<f64>, enough: usize, iterations: usize) -> Option<Timing> {
        let counts = (all.len(), clean.len());
        let mut seconds = if clean.len() >= enough.min(all.len()) { clean } else { all };
        seconds.sort_by(f64::total_cmp);
        let (min, max) = (*seconds.first()?, *seconds.last()?);
        let middle = seconds.len() / 2;
        let upper = *seconds.get(middle)?;
        let median = if seconds.len().is_multiple_of(2) { (seconds.get(middle - 1)? + upper) / 2.0 } else { upper };
        Some(Timing { median, min, max, iterations, repetitions: counts.0, clean: counts.1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let of = |v: &[f64]| Timing::of(v.to_vec(), v.to_vec(), 3, 10);
        assert_eq!(of(&[]), None);
        let t = of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((t.median, t.min, t.max, t.iterations, t.repetitions, t.clean), (2.0, 1.0, 3.0, 10, 3, 3));
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(of(&[7.0]).unwrap().median, 7.0);
    }

    #[test]
    fn disturbed_repetitions_count_only_when_too_few_are_clean() {
        let all = vec![9.0, 1.0, 8.0, 2.0, 3.0];
        let t = Timing::of(all.clone(), vec![1.0, 2.0, 3.0], 3, 1).unwrap();
        assert_eq!((t.median, t.max, t.repetitions, t.clean), (2.0, 3.0, 5, 3));
        let t = Timing::of(all, vec![1.0, 2.0], 3, 1).unwrap();
        assert_eq!((t.median, t.max, t.clean), (3.0, 9.0, 2));
    }
}
