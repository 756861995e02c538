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
        scope.spawn(move || {
            // Unpinned, the number is less sure and still one.
            let _ = pin(1);
            (1..=BATCHES * TRIPS).all(|i| {
                let arrived = wait(ping, i);
                pong.0.store(i, Ordering::Release);
                arrived
            })
        });
        let timer = scope.spawn(move || {
            let _ = pin(0);
            let mut batches = Vec::new();
            for batch in 0..BATCHES {
                let start = Instant::now();
                for i in batch * TRIPS + 1..=(batch + 1) * TRIPS {
                    ping.0.store(i, Ordering::Release);
                    if !wait(pong, i) {
                        // Lets the other side go: whatever it waits for has come.
                        ping.0.store(u32::MAX, Ordering::Release);
                        return None;
                    }
                }
                batches.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(TRIPS));
            }
            batches.sort_by(f64::total_cmp);
            batches.get(batches.len() / 4).copied()
        });
        timer.join().ok().flatten()
    })
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
