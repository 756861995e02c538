//! Long calls: simulates some repetitions and extrapolates the rest.
//!
//! Without contention the lanes are a max-plus linear system, whose times eventually grow by a constant per repetition
//! (F. Baccelli et al., "Synchronization and Linearity", 1992, theorem 3.23). The number of repetitions until then is
//! not known beforehand, and with shared links there is no such theorem. So three lengths are simulated, and the change
//! of speed from the second third to the last one is reported.

use super::engine::{self, Outcome, Path};
use super::report::{Extrapolated, Repeats};
use super::system::System;

/// Fewest repetitions in a third.
const FEWEST: usize = 8;

/// Simulates about `limit` messages of `system`.
pub(super) fn run(system: &System, limit: u64) -> Result<(Outcome, Extrapolated), String> {
    let runs = || system.ranks.iter().flat_map(|r| &r.lanes).flatten();
    let longest = runs().map(|r| r.times).max().unwrap_or(1) as usize;
    let what = if system.windows > longest { Repeats::Windows } else { Repeats::Steps };
    let all = system.windows.max(longest);
    // A third, two thirds and all of the simulated length: twice the work of the last alone.
    let short = |repetitions: usize| match what {
        Repeats::Windows => System { windows: repetitions, ..system.clone() },
        Repeats::Steps => {
            let mut short = system.clone();
            for run in short.ranks.iter_mut().flat_map(|r| &mut r.lanes).flatten() {
                // Steps that do not repeat, such as the first and last of a ring, keep their number.
                if run.times as usize * 2 > longest {
                    run.times = run.times - longest as u32 + repetitions as u32;
                }
            }
            short
        }
    };
    let fits = |third: usize| 2 * short(3 * third).messages() <= limit;
    if 3 * FEWEST >= all || !fits(FEWEST) {
        let messages = system.messages();
        return Err(format!(
            "{messages} messages have to be simulated, and at most {limit} can be: nothing in the call repeats often enough to shorten \
             it. Take fewer ranks, longer messages, or another algorithm"
        ));
    }
    let (mut low, mut high) = (FEWEST, all / 3);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    let third = low;
    let time = |repetitions| engine::run(&short(repetitions)).map_err(|e| e.to_string());
    let (one, two, three) = (time(third)?, time(2 * third)?, time(3 * third)?);
    let left = (all - 3 * third) as f64 / third as f64;
    let uncertainty = ((three.path.at - two.path.at) - (two.path.at - one.path.at)).abs() * left;
    let path = grown(&two.path, &three.path, left);
    let extrapolated = Extrapolated { what, simulated: 3 * third, all, uncertainty };
    Ok((Outcome { path, messages: one.messages + two.messages + three.messages }, extrapolated))
}

/// `last` plus `times` its difference to `before`, in every component. If the critical path takes another route,
/// components could become negative: then all grow alike.
fn grown(before: &Path, last: &Path, times: f64) -> Path {
    let at = last.at + times * (last.at - before.at);
    let part = |before: f64, last: f64| last + times * (last - before);
    let mut path = Path {
        at,
        latency: part(before.latency, last.latency),
        overhead: part(before.overhead, last.overhead),
        reduce: part(before.reduce, last.reduce),
        copy: part(before.copy, last.copy),
        hops: part(before.hops as f64, last.hops as f64).max(0.0).round() as u64,
        ..*last
    };
    for (mine, (b, l)) in path.transfer.iter_mut().zip(before.transfer.iter().zip(last.transfer)) {
        *mine = part(*b, l);
    }
    for (mine, (b, l)) in path.step.iter_mut().zip(before.step.iter().zip(last.step)) {
        *mine = part(*b, l);
    }
    let parts = [path.latency, path.overhead, path.reduce, path.copy];
    if parts.iter().chain(&path.transfer).chain(&path.step).all(|&p| p >= 0.0) {
        return path;
    }
    let scale = at / last.at;
    let mut path = Path {
        at,
        call: last.call * scale,
        latency: last.latency * scale,
        overhead: last.overhead * scale,
        reduce: last.reduce * scale,
        copy: last.copy * scale,
        hops: (last.hops as f64 * scale) as u64,
        ..*last
    };
    path.transfer.iter_mut().chain(&mut path.step).for_each(|p| *p *= scale);
    path
}
