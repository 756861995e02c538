//! A clock for what every call records: the processor's counter, which is read in a few nanoseconds and by no system
//! call. [`Scale`] turns its ticks into time, when someone looks at the record.
//!
//! The counters of all cores of a host count together and at one rate on every processor of the last fifteen years
//! (`constant_tsc` and `nonstop_tsc` on x86, the generic timer of ARM). Where that is not so, times of a record are
//! wrong and nothing else is.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Shortest time over which the rate is measured.
const BASE: Duration = Duration::from_millis(20);

/// Returns the count of ticks.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and it writes no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Returns the count of ticks.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub fn now() -> u64 {
    let ticks: u64;
    // SAFETY: Linux lets programs read this register, which writes no memory.
    unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
    ticks
}

/// Returns the nanoseconds of the system's clock.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A moment on both clocks.
#[derive(Debug, Clone, Copy)]
struct Moment {
    ticks: u64,
    since: Instant,
}

impl Moment {
    fn now() -> Moment {
        Moment { ticks: now(), since: Instant::now() }
    }
}

fn first() -> Moment {
    static FIRST: OnceLock<Moment> = OnceLock::new();
    *FIRST.get_or_init(Moment::now)
}

/// Begins to measure the rate, if nothing has.
pub fn start() {
    first();
}

/// Ticks as times of day.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    ticks: u64,
    /// Nanoseconds since 1970 at these ticks.
    ns: u64,
    ns_per_tick: f64,
}

impl Scale {
    /// Measures the rate from the [`start`] until now; waits up to 20 ms if that was a moment ago.
    pub fn now() -> Scale {
        let first = first();
        std::thread::sleep(BASE.saturating_sub(first.since.elapsed()));
        let last = Moment::now();
        let ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let passed = last.since.duration_since(first.since).as_nanos() as f64;
        let ticks = last.ticks.wrapping_sub(first.ticks);
        Scale { ticks: last.ticks, ns, ns_per_tick: if ticks == 0 { 1.0 } else { passed / ticks as f64 } }
    }

    /// Nanoseconds since 1970 when this was made.
    pub fn now_ns(&self) -> u64 {
        self.ns
    }

    /// Nanoseconds since 1970 at `ticks`.
    pub fn ns(&self, ticks: u64) -> u64 {
        let ago = self.ticks.wrapping_sub(ticks) as i64 as f64 * self.ns_per_tick;
        (self.ns as i64).saturating_sub(ago as i64).max(0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_times_of_day_in_the_order_of_the_clock() {
        start();
        let day = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let moments: Vec<(u64, u64, u64)> = (0..100).map(|_| (day(), now(), day())).collect();
        let scale = Scale::now();
        for &(before, ticks, after) in &moments {
            // The rate of 20 ms is right to a few parts in 10,000; the system may set its clock meanwhile.
            let ns = scale.ns(ticks);
            assert!((before - 1_000_000..after + 1_000_000).contains(&ns), "{ns} is not from {before} to {after}");
        }
        assert!(moments.is_sorted_by_key(|moment| scale.ns(moment.1)));
        // Also of a moment after the scale was made, and before the counter began.
        assert!(scale.ns(now()) >= scale.ns(moments[0].1));
        assert_eq!(Scale { ticks: 10, ns: 5, ns_per_tick: 1.0 }.ns(0), 0);
    }
}
