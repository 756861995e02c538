//! How often something is measured, and when there is no more time for it.

use std::time::{Duration, Instant};

use super::order::piece;
use crate::error::Result;
use crate::topology::fit;

/// Samples of one figure, if time allows; more where a buffer has more pieces.
pub(super) const SAMPLES: usize = 15;
/// Fewer than these do not show whether the machine was quiet.
const ENOUGH: usize = 3;
/// Most calls between two looks at the clock.
const BATCH: usize = 8;

/// Samples for a buffer of `bytes` bytes: every piece twice.
pub(super) fn samples(bytes: usize) -> usize {
    SAMPLES.max(2 * (bytes / piece(bytes).max(1)))
}

/// The leader's clock.
pub(super) struct Clock {
    pub(super) end: Instant,
    /// There was time for every figure, and each came out much the same every time.
    pub(super) steady: bool,
}

impl Clock {
    pub(super) fn has(&self, ns: f64) -> bool {
        ns <= self.end.saturating_duration_since(Instant::now()).as_nanos() as f64
    }

    /// Repeats `batch(calls)` until there are `most` samples, the slice is over, or another call might not be over in time.
    /// The first call is expected to take `guess` nanoseconds; `None` when there is no time for it.
    pub(super) fn sample(
        &mut self,
        guess: f64,
        most: usize,
        slice: Duration,
        mut batch: impl FnMut(usize) -> Result<Vec<f64>>,
    ) -> Result<Option<f64>> {
        let start = Instant::now();
        let mut times: Vec<f64> = Vec::new();
        // A guess may be off by some factor.
        let mut expected = 2.0 * guess;
        while times.len() < most && self.has(expected) {
            let left = slice.saturating_sub(start.elapsed()).as_nanos() as f64;
            let calls = ((left / expected.max(1.0)) as usize).min(most - times.len());
            // One first: it finds cold caches, and tells how many more there is time for. Two or three after it in any case.
            let calls = match times.len() {
                0 => 1,
                n if n <= ENOUGH => calls.clamp(1, BATCH),
                _ if calls == 0 => break,
                _ => calls.min(BATCH),
            };
            let new = batch(calls)?;
            expected = new.iter().copied().fold(0.0, f64::max);
            times.extend(new);
        }
        if times.len() > 1 {
            times.remove(0);
        }
        self.steady &= times.len() >= ENOUGH && fit::is_steady(&times);
        Ok(fit::typical(&times))
    }
}
