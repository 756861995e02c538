//! `--explain`: the cost model's choice for each size, the reasons, and the cost of the runner-up; with `--measure`
//! also the measured times.

use std::fmt::Write as _;

use anyhow::Result;
use tinynccl::Comm;
use tinynccl::algorithm::Shape;
use tinynccl::comm::Source;
use tinynccl::topology::{Bound, Choice, Estimate};
use tinynccl::wire::Collective;

use crate::args::{Args, Plan};
use crate::case::{Case, Layout, Place};
use crate::memory::Arena;
use crate::pattern::{Number, Pattern, Tables, with_type};
use crate::session::say;
use crate::{choose, pin, row};

/// A choice counts as wrong when it was slower than the runner-up by this factor; less may be noise.
const WRONG: f64 = 1.1;

/// Explains every case and size; rank 0 prints. The number of wrong elements is the same on all ranks.
pub(crate) fn run(comm: &Comm, args: &Args, plan: &Plan) -> Result<u64> {
    let cases = plan.cases(comm.size()).map_err(anyhow::Error::msg)?;
    if args.pin {
        pin::to_core(comm.local_rank());
    }
    say(comm, &model(comm))?;
    for way in comm.relayed() {
        say(comm, &format!("# {way}"))?;
    }
    let mut arena = Arena::new(comm, plan.largest(&cases, comm.size()), args.buffers, args.huge_pages)?;
    let mut wrong = 0;
    let mut score = Score::default();
    for case in &cases {
        say(comm, &format!("#\n# {case}\n{}", heading(args.measure)))?;
        if case.collective == Collective::SendRecv {
            say(comm, "# one message: nothing to choose")?;
            continue;
        }
        wrong += with_type!(case.dtype, T => block::<T>(comm, case, args, plan, &mut arena, &mut score)?);
    }
    if args.measure {
        say(comm, &score.summary())?;
    }
    if score.by_hand > 0 {
        say(comm, &format!("#\n# choose.rs picks the same algorithm for {} of {} sizes", score.same, score.by_hand))?;
    }
    comm.barrier()?;
    Ok(wrong)
}

/// The sizes of one case.
fn block<T: Number>(
    comm: &Comm,
    case: &Case,
    args: &Args,
    plan: &Plan,
    arena: &mut Arena,
    score: &mut Score,
) -> Result<u64> {
    let tables = Tables::<T>::new(&Pattern::new::<T>(case.op, comm.size(), args.seed));
    let usual = comm.config().algorithm;
    let mut wrong = 0;
    for bytes in plan.rows_of(case, comm.size()) {
        let layout = case.layout(bytes, comm.size());
        let segment = layout.count * case.dtype.size();
        let choice = comm.explain(&case.call(layout.count))?;
        let (Some(chosen), second) = (choice.chosen(), choice.runner_up()) else { continue };
        let shape = Shape {
            collective: case.collective,
            ranks: comm.size(),
            root: case.root.unwrap_or(0),
            channels: comm.config().channels,
        };
        let model = comm.cost_model();
        if choose::applies(&model, comm.size())
            && let Some([ours, theirs]) = choose::both(&choice, &shape, segment, &model)
        {
            score.by_hand += 1;
            score.same += usize::from(ours.algorithm == theirs.algorithm);
        }
        let mut measured = (None, None);
        if args.measure {
            let mut time = |estimate: &Estimate| -> Result<f64> {
                comm.set_algorithm(Some(estimate.algorithm));
                let row = row::run(comm, case, Place::Out, layout, &tables, &plan.settings, arena)?;
                comm.set_algorithm(usual);
                let Some(row) = row else { anyhow::bail!("{case}: nothing to measure out of place") };
                wrong += row.wrong.unwrap_or(0);
                Ok(row.timing.median * 1e6)
            };
            measured = (Some(time(chosen)?), second.map(&mut time).transpose()?);
            score.add(chosen.ns * 1e-3, measured.0, measured.1);
            if let (Some(second), Some(_)) = (second, measured.1) {
                score.estimate(second.ns * 1e-3, measured.1);
            }
        }
        say(comm, &line(case, layout, &choice, chosen, second, measured))?;
    }
    Ok(wrong)
}

/// The figures of the cost model, and their source.
fn model(comm: &Comm) -> String {
    let tuning = comm.tuning();
    let file = tuning.file.map(|file| file.display().to_string());
    let from = match tuning.source {
        Source::BuiltIn => "built in".to_owned(),
        Source::Cached => format!("from {}", file.unwrap_or_default()),
        Source::Measured => {
            let ms = tuning.took.as_secs_f64() * 1e3;
            let kept = file.map_or("not kept".to_owned(), |file| format!("kept in {file}"));
            format!("measured in {ms:.1} ms with {} messages, {kept}", tuning.messages)
        }
    };
    let m = comm.cost_model();
    let rates = |r: &tinynccl::topology::Rates| format!("{:.3} {:.3} {:.3}", r.l2, r.l3, r.memory);
    let placement = match m.placement.hosts(comm.size()) {
        1 => "all ranks share memory".to_owned(),
        n if n == comm.size() => "no ranks share memory".to_owned(),
        n => format!("{n} blocks of {} ranks that share memory", m.placement.block()),
    };
    format!(
        "# tinynccl {} ranks {}, cost model {from}\n\
         # {placement}; {} ranks per core; caches of {} KiB (L2) and {} KiB (L3)\n\
         # nanoseconds: call {:.0}, flag {:.0}, switch {:.0}, message {:.0} (shm) {:.0} (tcp)\n\
         # ns per byte in L2, L3, memory: shm {}, tcp {}, copy {}, combine {}\n\
         # memory with {} cores at once takes {:.2} times as long",
        env!("CARGO_PKG_VERSION"),
        comm.size(),
        m.ranks_per_core,
        m.caches.l2 >> 10,
        m.caches.l3 >> 10,
        m.call_ns,
        m.sync_ns,
        m.switch_ns,
        m.shm.alpha_ns,
        m.tcp.alpha_ns,
        rates(&m.shm.beta),
        rates(&m.tcp.beta),
        rates(&m.copy),
        rates(&m.reduce),
        m.busy_cores,
        m.crowding(),
    )
}

fn heading(measure: bool) -> String {
    let names = ["size", "algorithm", "message", "us", "runner-up", "us"];
    let mut line =
        format!("#{:>11}  {:<17}{:>9}{:>11}  {:<17}{:>11}", names[0], names[1], names[2], names[3], names[4], names[5]);
    if measure {
        line += &format!("{:>13}{:>11}", "measured us", "runner-up");
    }
    line + "   why"
}

fn line(
    case: &Case,
    layout: Layout,
    choice: &Choice,
    chosen: &Estimate,
    second: Option<&Estimate>,
    measured: (Option<f64>, Option<f64>),
) -> String {
    let us = |ns: f64| number(ns * 1e-3);
    let mut line = format!(
        "{:>12}  {:<17}{:>9}{:>11}  {:<17}{:>11}",
        case.bytes(layout),
        chosen.algorithm.name(),
        chosen.message,
        us(chosen.ns),
        second.map_or("none", |e| e.algorithm.name()),
        second.map_or("-".to_owned(), |e| us(e.ns)),
    );
    if let Some(time) = measured.0 {
        let _ = write!(line, "{:>13}{:>11}", number(time), measured.1.map_or("-".to_owned(), number));
    }
    let _ = write!(line, "   {}", why(choice, chosen));
    line
}

/// The terms of an estimate, the largest first, and its bound.
fn why(choice: &Choice, chosen: &Estimate) -> String {
    let mut terms: Vec<(&str, f64)> = chosen.cost.terms().into_iter().filter(|(_, ns)| *ns > 0.0).collect();
    terms.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut text: Vec<String> = terms.iter().map(|(name, ns)| format!("{name} {}", number(ns * 1e-3))).collect();
    let windows = chosen.cost.windows;
    if windows > 1.0 {
        text.push(format!("{windows} windows"));
    }
    let bound = match chosen.cost.bound {
        Bound::Path => "longest chain",
        Bound::Load => "busiest rank",
        Bound::Cores => "shared cores",
    };
    text.push(bound.to_owned());
    if choice.estimates.first().is_some_and(|best| best.algorithm != chosen.algorithm) {
        text.push("asked for".to_owned());
    }
    if choice.packed {
        text.push("packed trees are taken instead (TINYNCCL_TOPOLOGY)".to_owned());
    }
    if let Some(limit) = &choice.limit {
        text.push(format!("the links allow {} ({})", number(limit.ns * 1e-3), limit.links.join(", ")));
    }
    if let Some(refused) = choice.refused {
        text.push(format!("{refused} cannot do this"));
    }
    text.join(", ")
}

/// Microseconds with four digits.
fn number(us: f64) -> String {
    let decimals = if us < 10.0 {
        3
    } else if us < 1000.0 {
        1
    } else {
        0
    };
    format!("{us:.decimals$}")
}

/// Accuracy of estimates and choices against the measured times.
#[derive(Debug, Default, PartialEq)]
struct Score {
    /// |ln(estimate / measured)|.
    errors: Vec<f64>,
    choices: usize,
    right: usize,
    /// ln(time of the choice / time of the faster of choice and runner-up).
    lost: f64,
    /// Choices of [`choose`], and how many are the library's.
    by_hand: usize,
    same: usize,
}

impl Score {
    fn add(&mut self, estimate: f64, chosen: Option<f64>, second: Option<f64>) {
        self.estimate(estimate, chosen);
        if let (Some(chosen), Some(second)) = (chosen, second) {
            self.choices += 1;
            self.right += usize::from(chosen < WRONG * second);
            self.lost += (chosen / chosen.min(second)).ln();
        }
    }

    fn estimate(&mut self, estimate: f64, measured: Option<f64>) {
        let error = measured.map(|measured| (estimate / measured).ln().abs());
        self.errors.extend(error.filter(|e| e.is_finite()));
    }

    fn summary(&self) -> String {
        let mean = self.errors.iter().sum::<f64>() / self.errors.len().max(1) as f64;
        let worst = self.errors.iter().copied().fold(0.0, f64::max);
        let lost = (self.lost / self.choices.max(1) as f64).exp();
        format!(
            "#\n# Estimates are off by a factor of {:.2} (geometric mean of {}), {:.2} at worst\n\
             # Choices no more than {:.0} % slower than the runner-up: {} of {}; time of the choices / of the better one: {lost:.3}",
            mean.exp(),
            self.errors.len(),
            worst.exp(),
            (WRONG - 1.0) * 100.0,
            self.right,
            self.choices,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits_or_so() {
        assert_eq!([0.1234567, 12.345, 12345.6].map(number), ["0.123", "12.3", "12346"]);
    }

    #[test]
    fn the_score_counts_errors_both_ways_and_wrong_choices() {
        let mut score = Score::default();
        score.add(2.0, Some(1.0), Some(4.0));
        score.add(1.0, Some(2.0), Some(1.0));
        score.add(1.0, Some(1.05), Some(1.0));
        score.estimate(1.0, None);
        assert_eq!((score.errors.len(), score.choices, score.right), (3, 3, 2));
        let text = score.summary();
        assert!(text.contains("2.00 at worst") && text.contains("2 of 3"), "{text}");
        assert!(Score::default().summary().contains("1.00"), "nothing measured is no division by zero");
    }
}
