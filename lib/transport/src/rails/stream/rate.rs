//! Bytes in flight on a NIC pair and its measured rate, so that each fragment goes where it arrives first.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use tinynccl_sys::threads::lock;

/// A rate counts as unknown again once a NIC pair has been idle for `STALE` times what a long fragment would take at
/// this rate. So a rate that was measured in a bad moment is tried again, and a slow NIC pair costs two hundredths of
/// the time.
const STALE: u64 = 50;
const LONG: u64 = 512 << 10;
/// Bytes from which a rate is taken.
const MEASURED: f64 = 128.0 * 1024.0;
/// Bytes after which what was before counts half.
const REMEMBERED: f64 = 2048.0 * 1024.0;

/// Returns the microseconds since the first call.
fn clock() -> u64 {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGIN.elapsed().as_micros() as u64
}

/// Load of a queue pair, or of the streams of a connection on one NIC pair, which share its rate.
#[derive(Debug, Default)]
pub(in crate::rails) struct Load {
    /// Bytes sent, and not known to have arrived.
    bytes: AtomicU64,
    /// KiB per second; 0: not known.
    rate: AtomicU64,
    /// Time at which bytes in flight last went down, in microseconds of [`clock`]; 0 before.
    used: AtomicU64,
    meter: Mutex<Meter>,
}

/// Bytes that have arrived while some were in flight, and the seconds that it took; the older half counts half.
/// Arrivals are reported in bursts, so a rate of the last few bytes would be far off.
#[derive(Debug, Default)]
struct Meter {
    bytes: f64,
    seconds: f64,
    last: Option<Instant>,
}

impl Load {
    /// Counts `bytes` bytes as sent.
    pub(in crate::rails) fn sent(&self, bytes: usize) {
        if self.bytes.fetch_add(bytes as u64, Ordering::AcqRel) == 0 {
            lock(&self.meter).last = Some(Instant::now());
        }
    }

    /// Counts `bytes` bytes as arrived, and measures the rate.
    pub(in crate::rails) fn arrived(&self, bytes: usize) {
        self.cancel(bytes);
        let mut meter = lock(&self.meter);
        if let Some(last) = meter.last.replace(Instant::now()) {
            let time = last.elapsed();
            self.measured(&mut meter, bytes, time);
        }
    }

    /// Takes back `bytes` bytes that will not arrive on this NIC pair.
    pub(in crate::rails) fn cancel(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes as u64, Ordering::AcqRel);
        self.used.store(clock(), Ordering::Relaxed);
    }

    /// Forgets the measured rate: a stream is lost, and what was measured meanwhile says nothing of a NIC pair that
    /// works.
    pub(in crate::rails) fn reset(&self) {
        *lock(&self.meter) = Meter { last: Some(Instant::now()), ..Meter::default() };
        self.rate.store(0, Ordering::Relaxed);
    }

    fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    fn measured(&self, meter: &mut Meter, bytes: usize, time: Duration) {
        meter.bytes += bytes as f64;
        meter.seconds += time.as_secs_f64();
        if meter.bytes >= MEASURED {
            self.rate.store((meter.bytes / 1024.0 / meter.seconds.max(1e-6)).max(1.0) as u64, Ordering::Relaxed);
        }
        if meter.bytes >= REMEMBERED {
            meter.bytes /= 2.0;
            meter.seconds /= 2.0;
        }
    }

    /// Time until `more` bytes would have arrived after those in flight, in units of 1/1024 s. `rate`, in KiB/s, stands
    /// in for a rate that is unknown or stale.
    fn arrival(&self, more: u64, rate: u64, now: u64) -> f64 {
        let (bytes, own) = (self.bytes.load(Ordering::Relaxed), self.rate());
        let idle = now.saturating_sub(self.used.load(Ordering::Relaxed));
        let stale = || bytes == 0 && idle > STALE * LONG * 1000 / own;
        let rate = if own == 0 || stale() { rate } else { own };
        (bytes + more) as f64 / rate.max(1) as f64
    }
}

/// Returns `Ok` if `bytes` more bytes would arrive as early at `index` as anywhere else, else `Err` with the index at
/// which they would arrive first.
pub(in crate::rails) fn first_to_arrive<'a>(
    index: usize,
    bytes: usize,
    all: impl Iterator<Item = (usize, &'a Load)> + Clone,
) -> Result<(), usize> {
    let fastest = all.clone().map(|(_, load)| load.rate()).max().unwrap_or(0);
    let now = clock();
    let arrivals = all.map(|(i, load)| (i, load.arrival(bytes as u64, fastest, now)));
    let own = arrivals.clone().find(|(i, _)| *i == index).map_or(f64::INFINITY, |(_, time)| time);
    match arrivals.min_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((other, time)) if other != index && time < own => Err(other),
        _ => Ok(()),
    }
}

/// Returns true if the fastest known rate is more than about 1.5 times the slowest one.
pub(in crate::rails) fn differ<'a>(all: impl Iterator<Item = &'a Load>) -> bool {
    let known = all.map(Load::rate).filter(|rate| *rate > 0);
    let (least, most) = known.fold((u64::MAX, 0), |(least, most), rate| (least.min(rate), most.max(rate)));
    most / 3 > least / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_faster_rail_is_due_until_it_has_more_under_way() {
        let (fast, slow) = (Load::default(), Load::default());
        let now = clock();
        assert_eq!(fast.arrival(1000, 0, now), slow.arrival(1000, 0, now), "nothing is known");
        for (load, rate) in [(&fast, 2 << 20), (&slow, 1 << 20)] {
            load.measured(&mut Meter::default(), rate, SECOND);
            // Used now: the clock may have begun long ago, with another test.
            load.cancel(0);
        }
        assert!(fast.arrival(1000, 0, now) < slow.arrival(1000, 0, now));
        assert!(differ([&slow, &fast, &Load::default()].into_iter()) && !differ([&slow, &slow].into_iter()));
        assert!(!differ([&Load::default(), &Load::default()].into_iter()), "nothing is known");
        fast.sent(2000);
        assert!(fast.arrival(1000, 0, now) > slow.arrival(1000, 0, now));
        slow.sent(500);
        assert_eq!(fast.arrival(1000, 0, now), slow.arrival(1000, 0, now));
        fast.cancel(2000);
        // A new NIC pair is taken for as fast as the fastest.
        assert_eq!(Load::default().arrival(1000, fast.rate(), now), fast.arrival(1000, 0, now));
        // And so is one that has had nothing for long: 25 seconds, as half a MiB would take half a second.
        slow.cancel(500);
        let used = slow.used.load(Ordering::Relaxed);
        let taken = |after: u64| slow.arrival(1000, fast.rate(), used + after) == fast.arrival(1000, 0, now);
        assert!(!taken(20_000_000) && taken(30_000_000));
    }

    #[test]
    fn arrivals_in_bursts_have_the_rate_of_all() {
        let (load, mut meter) = (Load::default(), Meter::default());
        load.measured(&mut meter, 100 << 10, SECOND);
        assert_eq!(load.rate(), 0, "too few bytes");
        for _ in 0..100 {
            load.measured(&mut meter, 250 << 10, Duration::ZERO);
            load.measured(&mut meter, 250 << 10, SECOND / 2);
        }
        let rate = load.rate();
        assert!((900..=1100).contains(&rate), "{rate} KiB/s, of 1000");
        // Slower from now on: forgotten after some MiB.
        (0..40).for_each(|_| load.measured(&mut meter, 250 << 10, SECOND));
        let rate = load.rate();
        assert!((250..=275).contains(&rate), "{rate} KiB/s, of 250");
        load.reset();
        assert_eq!(load.rate(), 0);
    }
}
