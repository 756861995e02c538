//! Time on the device: events in a stream, medians.

use anyhow::Result;
use cudarc::driver::{CudaStream, sys::CUevent_flags};

use crate::device::cuda;

/// Launches between two events: enough to hide the events' resolution (0.5 µs).
const BETWEEN: u32 = 20;

/// Median time of one `work` on the device's clock, in seconds, over `repetitions` series of [`BETWEEN`] calls. `work`
/// only enqueues, so each launch overlaps with the kernel before it, as in a program that enqueues ahead.
pub(crate) fn seconds(stream: &CudaStream, repetitions: u32, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let event = || {
        stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(|e| cuda("cannot make an event", e))
    };
    let (start, end) = (event()?, event()?);
    for _ in 0..BETWEEN {
        work()?;
    }
    let mut times = Vec::new();
    for _ in 0..repetitions {
        start.record(stream).map_err(|e| cuda("cannot record an event", e))?;
        for _ in 0..BETWEEN {
            work()?;
        }
        end.record(stream).map_err(|e| cuda("cannot record an event", e))?;
        let ms = start.elapsed_ms(&end).map_err(|e| cuda("the timed kernels failed", e))?;
        times.push(f64::from(ms) / 1e3 / f64::from(BETWEEN));
    }
    Ok(median(&mut times))
}

/// The middle value; of two middle values, the lower one.
pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_ignores_order_and_outliers() {
        assert_eq!(median(&mut [9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 900.0]), 2.0);
        assert!(median(&mut []).is_nan());
    }
}
