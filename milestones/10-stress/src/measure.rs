//! How a call is timed.
//!
//! Warm-up, then repetitions. Each repetition begins with a barrier; then the call is made several times back to back; the
//! repetition counts with the mean of its calls on the slowest rank. The result is the median over the repetitions. Small
//! broadcasts and reduces therefore show how fast the root issues them, not how long one takes to arrive: the
//! root runs ahead (nccl-tests has the same property).

use std::time::{Duration, Instant};

use tinynccl::{Comm, ReduceOp, Result};

use crate::stats::Timing;

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Calls before the clock counts.
    pub(crate) warm_up: usize,
    /// Calls per repetition; `None` chooses by how long one takes.
    pub(crate) iterations: Option<usize>,
    /// Repetitions.
    pub(crate) repetitions: usize,
    /// Time for all repetitions of a row, when iterations are chosen.
    pub(crate) budget: Duration,
}

/// Most calls per repetition that are chosen by themselves.
const MOST: f64 = 20_000.0;
/// Fewest repetitions, however slow a call is.
const FEWEST: usize = 3;

impl Effort {
    /// Calls per repetition and repetitions, when one call takes about `seconds`.
    fn plan(&self, seconds: f64) -> (usize, usize) {
        if let Some(iterations) = self.iterations {
            return (iterations.max(1), self.repetitions.max(1));
        }
        let calls = (self.budget.as_secs_f64() / seconds.max(1e-9)).max(1.0);
        let repetitions = (calls as usize).clamp(FEWEST.min(self.repetitions), self.repetitions).max(1);
        ((calls / repetitions as f64).clamp(1.0, MOST) as usize, repetitions)
    }
}

/// Times `call`. All ranks must make the same calls, and get the same number of them.
pub(crate) fn time(comm: &Comm, effort: &Effort, mut call: impl FnMut() -> Result<()>) -> Result<Option<Timing>> {
    for _ in 0..effort.warm_up {
        call()?;
    }
    let estimate = repetition(comm, 2, &mut call)?;
    // Every rank has the same estimate, so every rank has the same plan.
    let (iterations, repetitions) = effort.plan(estimate);
    let seconds = (0..repetitions).map(|_| repetition(comm, iterations, &mut call)).collect::<Result<Vec<_>>>()?;
    Ok(Timing::of(seconds, iterations))
}

/// Mean time of `iterations` calls, in seconds, on the slowest rank.
fn repetition(comm: &Comm, iterations: usize, call: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..iterations {
        call()?;
    }
    let mut slowest = [start.elapsed().as_secs_f64() / iterations as f64];
    comm.all_reduce_in_place(&mut slowest, ReduceOp::Max)?;
    Ok(slowest[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effort_follows_the_time_of_a_call() {
        let effort = Effort { warm_up: 5, iterations: None, repetitions: 7, budget: Duration::from_millis(300) };
        assert_eq!(effort.plan(1e-6), (20_000, 7), "bounded");
        assert_eq!(effort.plan(100e-6), (428, 7));
        assert_eq!(effort.plan(70e-3), (1, 4));
        assert_eq!(effort.plan(2.0), (1, 3), "never fewer than three");
        assert_eq!(effort.plan(0.0), (20_000, 7));
        assert_eq!(Effort { iterations: Some(20), ..effort }.plan(2.0), (20, 7), "-n is kept");
        assert_eq!(Effort { repetitions: 1, ..effort }.plan(2.0), (1, 1));
    }
}
