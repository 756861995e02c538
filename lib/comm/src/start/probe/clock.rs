//! Decides how often an operation is measured, how far the buffers grow, and when the time is over.
//!
//! No work is begun that might not end in time: its cost is taken to be twice that of the last work of its kind, and
//! compared with the time left. [`calls`] and [`room`] decide; [`Clock`] reads the time and calls them.

use std::time::{Duration, Instant};

use super::order::piece;
use crate::topology::fit;
use tinynccl_plan::error::Result;

/// Samples of one figure, if time allows; more where a buffer has more pieces.
pub(super) const SAMPLES: usize = 15;
/// Fewer samples do not show whether the machine was quiet.
const ENOUGH: usize = 3;
/// Most calls between two clock readings.
const BATCH: usize = 8;
/// Factor by which an operation may exceed its expected time.
const PESSIMISM: f64 = 2.0;
/// Bytes of a buffer that are touched between two clock readings: a huge page.
const STEP: usize = 2 << 20;
/// The price of touching a byte of both buffers for the first time.
#[derive(Debug, Clone, Copy)]
struct Touch {
    ns: f64,
    /// A whole step took this time. Otherwise it is a guess, or the time of part of a step that took longer than the
    /// guess.
    measured: bool,
}

/// 4 µs for a page of 4 KiB: what a virtual machine takes.
const GUESS: Touch = Touch { ns: 2.0, measured: false };

/// Samples for a buffer of `bytes` bytes: every piece twice.
pub(super) fn samples(bytes: usize) -> usize {
    SAMPLES.max(2 * (bytes / piece(bytes).max(1)))
}

/// Calls to make next, with `taken` of `most` samples there, and calls that took up to `expected` nanoseconds; 0: no
/// more. `slice` and `left`: nanoseconds until enough time has gone into this figure, and until the deadline.
fn calls(taken: usize, most: usize, expected: f64, slice: f64, left: f64) -> usize {
    let expected = expected.max(1.0);
    // Conversions saturate.
    let possible = (left / (PESSIMISM * expected)) as usize;
    let sensible = (slice / expected) as usize;
    // One call first: its caches are cold, and it shows how many more there is time for. Two or three follow in any
    // case.
    let wanted = match taken {
        0 => 1,
        n if n <= ENOUGH => sensible.clamp(1, BATCH),
        _ => sensible.min(BATCH),
    };
    wanted.min(most.saturating_sub(taken)).min(possible)
}

/// New length, in bytes, for buffers of `room` bytes that should have `bytes`, and are of use from `least` on; `None`:
/// no further growth. Touching a byte costs `touch`, and `left` nanoseconds are left.
fn room(room: usize, bytes: usize, least: usize, touch: Touch, left: f64) -> Option<usize> {
    // A first step measures the price. After it, there must be time for enough steps.
    let whole = if touch.measured { left / touch.ns.max(1e-3) } else { f64::INFINITY };
    let step = left / (PESSIMISM * touch.ns.max(1e-3));
    let reach = |bytes: f64| room.saturating_add(bytes as usize);
    let next = ((room / STEP + 1) * STEP).min(bytes);
    (reach(whole) >= least.min(bytes) && reach(step) >= next && next > room).then_some(next)
}

/// The leader's clock.
pub(super) struct Clock<'a> {
    now: &'a dyn Fn() -> Instant,
    end: Instant,
    /// There was time for every figure, and the samples of each agreed.
    pub(super) steady: bool,
    touch: Touch,
}

impl<'a> Clock<'a> {
    pub(super) fn new(now: &'a dyn Fn() -> Instant, end: Instant) -> Clock<'a> {
        Clock { now, end, steady: true, touch: GUESS }
    }

    /// Nanoseconds until the deadline.
    fn left(&self) -> f64 {
        self.end.saturating_duration_since((self.now)()).as_nanos() as f64
    }

    /// Repeats `batch(calls)` until there are `most` samples, the slice is over, or another call might not be over in
    /// time. The first call is expected to take `guess` nanoseconds; `None` when there is no time for it.
    pub(super) fn sample(
        &mut self,
        guess: f64,
        most: usize,
        slice: Duration,
        mut batch: impl FnMut(usize) -> Result<Vec<f64>>,
    ) -> Result<Option<f64>> {
        let start = (self.now)();
        let mut times: Vec<f64> = Vec::new();
        let mut expected = guess;
        loop {
            let slice = slice.saturating_sub((self.now)().saturating_duration_since(start)).as_nanos() as f64;
            let calls = calls(times.len(), most, expected, slice, self.left());
            if calls == 0 {
                break;
            }
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

    /// Grows buffers of `have` bytes towards `bytes`, by calls of `grow` with the next size, as far as time allows; not
    /// at all if that is less than `least`. Returns the new size.
    pub(super) fn grow(
        &mut self,
        mut have: usize,
        bytes: usize,
        least: usize,
        mut grow: impl FnMut(usize) -> Result<()>,
    ) -> Result<usize> {
        while have < bytes {
            let Some(next) = room(have, bytes, least, self.touch, self.left()) else {
                self.steady = false;
                break;
            };
            let start = (self.now)();
            grow(next)?;
            let ns = (self.now)().saturating_duration_since(start).as_nanos() as f64 / (next - have) as f64;
            // The page of a partial step may already be mapped.
            self.touch = match next - have >= STEP {
                true => Touch { ns, measured: true },
                false => Touch { ns: ns.max(self.touch.ns), ..self.touch },
            };
            have = next;
        }
        Ok(have)
    }
}

#[cfg(test)]
mod tests;
