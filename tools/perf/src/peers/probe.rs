//! Distance of the first two cores from each other, now: the round-trip time of a cache line.
//!
//! A virtual machine's cores may be moved. Near ones share a cache (45 to 130 ns on AMD EPYC), far ones do not (260 to
//! 540 ns), and small messages take two to four times as long.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use program_kit::machine::pin;

/// Round trips of one batch, and batches.
const TRIPS: u32 = 500;
const BATCHES: u32 = 16;
/// Give up when a batch takes longer: the machine is busy with something else.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

/// Nanoseconds of a round trip between cores 0 and 1: the first quartile of several batches. `None` with a single core.
pub(crate) fn round_trip() -> Option<f64> {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return None;
    }
    let lines = [Line::default(), Line::default()];
    let [ping, pong] = &lines;
    std::thread::scope(|scope| {
        scope.spawn(|| side(1, pong, ping));
        scope.spawn(|| side(0, ping, pong)).join().ok().flatten()
    })
}

/// The thread on `core`, of which 0 begins; the first quartile of its batches.
fn side(core: usize, ours: &Line, theirs: &Line) -> Option<f64> {
    // Unpinned, the number is less sure and still one.
    let _ = pin(core);
    let mut batches = Vec::new();
    for batch in 0..BATCHES {
        let start = Instant::now();
        for i in batch * TRIPS + 1..=(batch + 1) * TRIPS {
            if core == 0 {
                ours.0.store(i, Ordering::Release);
            }
            if !wait(theirs, i) {
                return None;
            }
            if core == 1 {
                ours.0.store(i, Ordering::Release);
            }
        }
        batches.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(TRIPS));
    }
    batches.sort_by(f64::total_cmp);
    batches.get(batches.len() / 4).copied()
}

/// Waits until the line holds `value` or more; false after too long.
fn wait(line: &Line, value: u32) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..10_000 {
            if line.0.load(Ordering::Acquire) >= value {
                return true;
            }
        }
        if start.elapsed() > PATIENCE {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_ends_and_gives_a_time() {
        if let Some(ns) = round_trip() {
            assert!(ns > 0.0 && ns.is_finite(), "{ns}");
        }
    }
}
