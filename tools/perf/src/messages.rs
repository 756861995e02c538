//! Messages between two ends, and how perftest measures them.

use std::time::{Duration, Instant};

use anyhow::Result;
use program_kit::stats::median;

/// One end.
pub(crate) trait Messages {
    /// Sends a message of so many bytes: all that the end was made for, or one.
    fn send(&mut self, bytes: usize) -> Result<()>;
    /// Receives as much.
    fn recv(&mut self, bytes: usize) -> Result<()>;
}

/// Microseconds of half a round trip: the median of `n`, which perftest calls typical.
pub(crate) fn half_round_trip(end: &mut dyn Messages, first: bool, bytes: usize, n: usize) -> Result<f64> {
    let warm_up = n / 10;
    let mut times = Vec::with_capacity(n + warm_up);
    for _ in 0..n + warm_up {
        let start = Instant::now();
        if first {
            end.send(bytes)?;
        }
        end.recv(bytes)?;
        if !first {
            end.send(bytes)?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
    }
    Ok(median(&times[warm_up..]).unwrap_or(f64::NAN))
}

/// MiB/s of `n` messages from the first end to the second.
pub(crate) fn rate(end: &mut dyn Messages, first: bool, bytes: usize, n: usize) -> Result<f64> {
    stream(end, first, bytes, n / 10 + 1)?;
    let time = stream(end, first, bytes, n)?;
    Ok((bytes * n) as f64 / time.as_secs_f64() / f64::from(1 << 20))
}

/// The time from when both ends are ready until the second has all messages.
fn stream(end: &mut dyn Messages, first: bool, bytes: usize, n: usize) -> Result<Duration> {
    let signal = |end: &mut dyn Messages| if first { end.recv(1) } else { end.send(1) };
    signal(end)?;
    let start = Instant::now();
    for _ in 0..n {
        if first { end.send(bytes)? } else { end.recv(bytes)? }
    }
    signal(end)?;
    Ok(start.elapsed())
}
