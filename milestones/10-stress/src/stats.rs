//! Medians of measurements.

use serde::Serialize;

/// How long one call took, over several repetitions. Each repetition is the mean of its calls, on the slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Timing {
    /// Median over the repetitions, in seconds: what the table shows.
    pub(crate) median: f64,
    /// Fastest repetition, in seconds.
    pub(crate) min: f64,
    /// Slowest repetition, in seconds.
    pub(crate) max: f64,
    /// Calls per repetition, back to back.
    pub(crate) iterations: usize,
    /// Repetitions, with a barrier before each.
    pub(crate) repetitions: usize,
}

impl Timing {
    /// Sums up repetitions; `None` without any.
    pub(crate) fn of(mut seconds: Vec<f64>, iterations: usize) -> Option<Timing> {
        seconds.sort_by(f64::total_cmp);
        let (min, max) = (*seconds.first()?, *seconds.last()?);
        let middle = seconds.len() / 2;
        let upper = *seconds.get(middle)?;
        let median = if seconds.len().is_multiple_of(2) { (seconds.get(middle - 1)? + upper) / 2.0 } else { upper };
        Some(Timing { median, min, max, iterations, repetitions: seconds.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Timing::of(vec![], 1), None);
        let t = Timing::of(vec![3.0, 1.0, 2.0], 10).unwrap();
        assert_eq!((t.median, t.min, t.max, t.iterations, t.repetitions), (2.0, 1.0, 3.0, 10, 3));
        assert_eq!(Timing::of(vec![4.0, 1.0, 2.0, 3.0], 1).unwrap().median, 2.5);
        assert_eq!(Timing::of(vec![7.0], 1).unwrap().median, 7.0);
    }
}
