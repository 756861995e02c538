//! Timing of a call.
//!
//! Warm-up, then repetitions. Each repetition begins with a barrier and then makes the call several times back to back.
//! Its time is the mean of these calls on the slowest rank. The result is the median over the clean repetitions: those
//! in which no rank waited for its core. The root of a small broadcast runs ahead, so its time is that of issuing the
//! call, not that of its arrival (as with nccl-tests). With a barrier between the calls, as in OSU's benchmarks, the
//! time of a rank is the sum of its calls alone, and no rank runs ahead by more than one.
//!
//! In comparisons of programs, a repetition with the two ranks' cores far apart is not clean either (`probe.rs`).
//!
//! `scripts/peers/perf.h` is the same procedure in C, for other libraries; a change here must be made there too.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use tinynccl::{Comm, ReduceOp, Result};

use crate::probe;
use crate::stats::Timing;

/// The pause of all ranks between two timed calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Between {
    /// Nothing: calls back to back, as nccl-tests makes them.
    Nothing,
    /// A barrier, whose time does not count: as OSU's benchmarks make them.
    Barrier,
}

/// Extent of a measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Calls before the measurement.
    pub(crate) warm_up: usize,
    /// Calls per repetition; `None`: chosen by the time of one call.
    pub(crate) iterations: Option<usize>,
    /// Repetitions.
    pub(crate) repetitions: usize,
    /// Calls back to back, or a barrier between them.
    pub(crate) between: Between,
    /// Time for all repetitions of a row, when the number of iterations is chosen.
    pub(crate) budget: Duration,
    /// More ranks than cores: ranks always wait for a core, so every repetition counts.
    pub(crate) crowded: bool,
}

/// Most calls per repetition, when the number is chosen.
const MOST: usize = 20_000;
/// Fewest repetitions, for slow calls too.
const FEWEST: usize = 3;
/// Calls slower than this many seconds are estimated only once.
const SLOW: f64 = 0.01;
/// A repetition is disturbed when a rank waited for its core for more than this share of it,
const DISTURBED: f64 = 0.005;
/// and for more seconds than this.
const NOTHING: f64 = 3e-6;

impl Effort {
    /// Approximate seconds of one repetition.
    fn slice(&self) -> f64 {
        self.budget.as_secs_f64() / self.repetitions.max(1) as f64
    }

    /// Calls per repetition and repetitions, when one call takes about `seconds`.
    fn plan(&self, seconds: f64) -> (usize, usize) {
        if let Some(iterations) = self.iterations {
            return (iterations.max(1), self.repetitions.max(1));
        }
        let calls = (self.slice() / seconds.max(1e-9)) as usize;
        let fitting = (self.budget.as_secs_f64() / seconds.max(1e-9)) as usize;
        let repetitions = fitting.clamp(FEWEST.min(self.repetitions), self.repetitions).max(1);
        (calls.clamp(1, MOST), repetitions)
    }
}

/// Times `call`. All ranks must make the same calls, and get the same number of them.
pub(crate) fn time(comm: &Comm, effort: &Effort, mut call: impl FnMut() -> Result<()>) -> Result<Option<Timing>> {
    for _ in 0..effort.warm_up {
        call()?;
    }
    // Every rank has the same estimate, so every rank has the same plan.
    let (seconds, disturbed) = match effort.iterations {
        Some(_) => (0.0, false),
        None => estimate(comm, effort, &mut call)?,
    };
    let (iterations, repetitions) = effort.plan(seconds);
    let (mut all, mut clean) = (Vec::new(), Vec::new());
    // The estimate of a slow call is a repetition already.
    if seconds > SLOW && iterations == 1 {
        all.push(seconds);
        clean.extend((effort.crowded || !disturbed).then_some(seconds));
    }
    // A disturbed repetition is repeated, until four times the budget are spent.
    let (most, patience, mut spent) = (3 * repetitions, 4.0 * effort.budget.as_secs_f64(), 0.0);
    while clean.len() < repetitions && (all.len() < repetitions || (all.len() < most && spent < patience)) {
        let (seconds, disturbed) = repetition(comm, effort.between, iterations, &mut call)?;
        spent += seconds * iterations as f64;
        all.push(seconds);
        if effort.crowded || !disturbed {
            clean.push(seconds);
        }
    }
    Ok(Timing::of(all, clean, FEWEST, iterations))
}

/// Approximate seconds of a call, from 1, 4, 16, … calls until they fill a quarter of a repetition's time; and whether
/// the last of them were disturbed.
fn estimate(comm: &Comm, effort: &Effort, call: &mut impl FnMut() -> Result<()>) -> Result<(f64, bool)> {
    let (slice, mut calls) = (effort.slice(), 1);
    loop {
        // The fastest of three, so that one interruption does not decide; a slow call is tried once.
        let (mut fastest, mut last) = (f64::INFINITY, false);
        for _ in 0..3 {
            let (seconds, disturbed) = repetition(comm, effort.between, calls, call)?;
            (fastest, last) = (fastest.min(seconds), disturbed);
            if fastest * (calls as f64) < slice / 4.0 || fastest > SLOW {
                break;
            }
        }
        if fastest * calls as f64 >= slice / 4.0 || calls >= MOST {
            return Ok((fastest, last));
        }
        calls = (4 * calls).min(MOST);
    }
}

/// Mean time of `iterations` calls, in seconds, on the slowest rank; and whether a rank had to wait for its core.
fn repetition(
    comm: &Comm,
    between: Between,
    iterations: usize,
    call: &mut impl FnMut() -> Result<()>,
) -> Result<(f64, bool)> {
    comm.barrier()?;
    let mut far = probe::is_far();
    comm.barrier()?;
    let waited = waited();
    let start = Instant::now();
    let mut calls = Duration::ZERO;
    for _ in 0..iterations {
        match between {
            Between::Nothing => call()?,
            Between::Barrier => {
                let start = Instant::now();
                call()?;
                calls += start.elapsed();
                comm.barrier()?;
            }
        }
    }
    let all = start.elapsed();
    let took = if between == Between::Barrier { calls } else { all }.as_secs_f64();
    let waited = self::waited() - waited;
    let mut slowest = [took / iterations as f64];
    comm.all_reduce_in_place(&mut slowest, ReduceOp::Max)?;
    far |= probe::is_far();
    let mut disturbed = [u8::from(far || (waited > DISTURBED * all.as_secs_f64() && waited > NOTHING))];
    comm.all_reduce_in_place(&mut disturbed, ReduceOp::Max)?;
    Ok((slowest[0], disturbed[0] > 0))
}

/// Seconds since its start that this thread was runnable without a core; 0 where the kernel does not report it.
fn waited() -> f64 {
    thread_local!(static FILE: Option<File> = File::open("/proc/thread-self/schedstat").ok());
    let mut text = [0; 128];
    let nanoseconds = FILE.with(|file| {
        let len = file.as_ref()?.read_at(&mut text, 0).ok()?;
        // Time on a core, time waiting for one, number of time slices.
        std::str::from_utf8(text.get(..len)?).ok()?.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    nanoseconds.map_or(0.0, |n| n as f64 * 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effort_follows_the_time_of_a_call() {
        let budget = Duration::from_millis(300);
        let (between, crowded) = (Between::Nothing, false);
        let effort = Effort { warm_up: 5, iterations: None, repetitions: 7, between, budget, crowded };
        assert_eq!(effort.plan(1e-7), (20_000, 7), "bounded");
        assert_eq!(effort.plan(10e-6), (4285, 7));
        assert_eq!(effort.plan(100e-6), (428, 7));
        assert_eq!(effort.plan(70e-3), (1, 4));
        assert_eq!(effort.plan(2.0), (1, 3), "never fewer than three");
        assert_eq!(effort.plan(0.0), (20_000, 7));
        assert_eq!(Effort { iterations: Some(20), ..effort }.plan(2.0), (20, 7), "-n is kept");
        assert_eq!(Effort { repetitions: 1, ..effort }.plan(2.0), (1, 1));
    }
}
