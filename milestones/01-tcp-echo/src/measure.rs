//! Latency and bandwidth: timed round trips and their statistics.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::client::Client;

/// Untimed round trips at the start: the connection's window opens, caches and branch predictors warm up.
const WARM_UP: usize = 20;
/// Approximate number of bytes that one row of the bandwidth table moves in each direction.
const BYTES_PER_ROW: usize = 64 << 20;
/// Time limit of one measurement, which then ends with fewer round trips: with Nagle's algorithm each may take 44 ms.
const LONGEST: Duration = Duration::from_secs(3);

/// Order statistics of a set of times. There is no mean, because one interruption by the scheduler would move it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) trips: usize,
    pub(crate) min: Duration,
    pub(crate) median: Duration,
    pub(crate) p99: Duration,
}

impl Summary {
    /// `None` for an empty set. Percentiles use the nearest rank: the smallest time that at least p % of the times do
    /// not exceed.
    pub(crate) fn of(mut times: Vec<Duration>) -> Option<Summary> {
        times.sort_unstable();
        let rank = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied();
        Some(Summary { trips: times.len(), min: rank(0)?, median: rank(50)?, p99: rank(99)? })
    }
}

/// Times up to `count` round trips of `length` bytes after a warm-up, as many as [`LONGEST`] allows.
pub(crate) fn round_trips(client: &mut Client, length: usize, count: usize) -> Result<Option<Summary>> {
    for _ in 0..WARM_UP.min(count) {
        client.round_trip(length)?;
    }
    let start = Instant::now();
    let times = (0..count)
        .take_while(|_| start.elapsed() < LONGEST)
        .map(|_| client.round_trip(length))
        .collect::<Result<Vec<_>>>()?;
    Ok(Summary::of(times))
}

/// Prints the table of round trips from 8 bytes to `largest`.
///
/// The server echoes a frame only once it has all of it, so one direction is in use at a time:
/// bandwidth = 2 × bytes / round trip.
pub(crate) fn table(client: &mut Client, largest: usize) -> Result<()> {
    println!("{:>10} {:>7} {:>12} {:>12} {:>12} {:>10}", "bytes", "trips", "min us", "median us", "p99 us", "MB/s");
    for length in sizes(largest) {
        let count = (BYTES_PER_ROW / length).clamp(8, 1000);
        let Some(s) = round_trips(client, length, count)? else { continue };
        let rate = 2.0 * length as f64 / s.median.as_secs_f64() / 1e6;
        println!(
            "{length:>10} {:>7} {:>12.1} {:>12.1} {:>12.1} {rate:>10.1}",
            s.trips,
            micros(s.min),
            micros(s.median),
            micros(s.p99)
        );
    }
    Ok(())
}

/// 8, 32, 128, … up to and including `largest`.
fn sizes(largest: usize) -> impl Iterator<Item = usize> {
    let steps = std::iter::successors(Some(8usize), |n| n.checked_mul(4)).take_while(move |&n| n < largest);
    steps.chain([largest])
}

/// Microseconds, for printing.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_by_nearest_rank() {
        let times = |n: u64| (1..=n).rev().map(Duration::from_micros).collect::<Vec<_>>();
        let us = Duration::from_micros;
        assert_eq!(Summary::of(times(0)), None);
        assert_eq!(Summary::of(times(1)), Some(Summary { trips: 1, min: us(1), median: us(1), p99: us(1) }));
        assert_eq!(Summary::of(times(4)), Some(Summary { trips: 4, min: us(1), median: us(2), p99: us(4) }));
        assert_eq!(Summary::of(times(1000)), Some(Summary { trips: 1000, min: us(1), median: us(500), p99: us(990) }));
    }

    #[test]
    fn sizes_end_with_the_largest() {
        assert_eq!(sizes(8).collect::<Vec<_>>(), [8]);
        assert_eq!(sizes(100).collect::<Vec<_>>(), [8, 32, 100]);
        assert_eq!(sizes(16 << 20).last(), Some(16 << 20));
    }
}
