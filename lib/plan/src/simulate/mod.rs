//! Simulates the time of a collective on a described machine, from the same programs that run.
//!
//! | file | idea |
//! |---|---|
//! | [`mod@bound`] | the least time that a machine's links allow, whatever the schedule |
//! | [`machine`] | ranks, links and routes: built in, or from a description |
//! | [`packing`] | schedules of trees for the links of a machine |
//! | [`mod@ring_order`] | an order of the ranks for rings on a machine |
//! | `system` | the programs of all ranks on a machine: dependencies, and the links of each message |
//! | `refine` | simulates indistinguishable ranks once |
//! | `engine` | events: steps, messages, the critical path |
//! | `sharing` | max-min fair rates of the messages on shared links |
//! | `steady` | long calls: repetitions are added up once their time has become constant |
//! | [`report`] | time, its components, bytes per link |
//!
//! # The model
//! Alpha-beta-gamma with contention:
//! - A rank's lane takes its steps in order, as in the executor. A message to send goes onto its FIFO, one per channel
//!   and pair of ranks; the lane does not wait for it. A FIFO transfers one message at a time, in order.
//! - A transfer of n bytes over a route occupies every link on it, at the same rate. Transfers share links max-min
//!   fairly: no transfer can be faster without slowing one that is not faster itself. The last byte arrives `latency`
//!   after it was sent (alpha); a FIFO's next message need not wait for that.
//! - A rank's processor does one task at a time, first come, first served: `overhead` for each end of a message
//!   (LogGP's o), `reduce` per byte combined (gamma), `copy` per byte copied.
//! - A message is received whole before it is forwarded; its length is the library's
//!   ([`Partition`](crate::schedule::Partition)).
//!
//! So two ranks that exchange n bytes over an idle link of bandwidth B need alpha + n/B, and a ring of n ranks
//! 2(n-1)(alpha + S/n·beta) + (n-1)·S/n·gamma: tests compare with these formulas.
//!
//! Not modelled: the capacity of FIFOs (senders never wait for credit), caches, adaptive routing, packets, loss, ranks
//! that enter at different times.
//!
//! With shared links or processors, a few more bytes can take less time, because they change which transfers overlap
//! (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969): by some percent if many ranks work in step.
//!
//! # Exact and approximate methods
//!
//! [`Report::method`] lists the methods used:
//! - *all ranks*: every message of every rank is an event. Lengths are exact. Nothing is approximated within the model.
//! - *folded*: if the programs and the machine look the same from rank r and from rank r + b (or r xor b), only b ranks
//!   are simulated, and the others' load on shared links is counted. For rings, direct exchanges without a reduction,
//!   hypercubes.
//! - *refined*: ranks whose programs, routes and neighbours are alike form one class (colour refinement). For trees.
//!
//!   Folded and refined runs give the same times as all ranks do, to rounding, if all parts are equally long. They
//!   assume that; real parts differ by at most one unit (an element or 64 bytes).
//! - *extrapolated*: repeated windows or steps are simulated up to a number of events; the rest is assumed to run as
//!   fast as the last third. [`Report::uncertainty`] is the error of the time if the speed of the third before were
//!   right instead.
//!
//! Sources: R. W. Hockney (1994) for alpha and beta; A. Alexandrov et al., "LogGP" (1995) for the overhead; D.
//! Bertsekas and R. Gallager, "Data Networks", section 6.5.2, for max-min fairness; R. Paige and R. E. Tarjan, "Three
//! partition refinement algorithms" (1987) for the classes.

pub mod bound;
mod engine;
pub mod machine;
pub mod packing;
mod refine;
pub mod report;
pub mod ring_order;
mod sharing;
mod steady;
mod system;
#[cfg(test)]
mod tests;

pub use bound::Bound;
pub use machine::{Costs, Machine};
pub use report::{LinkLoad, Method, Report};

use std::borrow::Cow;
use std::convert::Infallible;

use crate::algorithm::{self, Hosts, Shape, hierarchical, supports};
use crate::error::{Error, Result};
use crate::schedule::{Loc, Program, Schedule};
use crate::topology::terms;
use crate::wire::Algorithm;
use system::{Lengths, System, Translation};

/// A call to simulate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scenario {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The collective and the number of ranks.
    pub shape: Shape,
    /// Elements of a segment.
    pub count: usize,
    /// Bytes of an element.
    pub elem_size: usize,
    /// Longest message in bytes.
    pub max_message: usize,
}

/// The data of a call by a schedule of the caller's making, and how it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Elements of a segment.
    pub count: usize,
    /// Bytes of an element.
    pub elem_size: usize,
    /// Longest message in bytes.
    pub max_message: usize,
}

/// Bounds of a simulation's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Messages up to which every rank is simulated; above, equivalent ranks are simulated once.
    pub all_ranks: u64,
    /// Most steps of programs that are read.
    pub steps: u64,
    /// Messages that are simulated before the rest is extrapolated.
    pub messages: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { all_ranks: 100_000, steps: 12_000_000, messages: 1_200_000 }
    }
}

/// Simulates a call.
///
/// # Errors
/// [`Error::InvalidArgument`] when the algorithm has no schedule for the call, the machine has too few ranks, or there
/// are more events than `limits` allow; the message gives their number.
pub fn simulate(call: &Scenario, machine: &dyn Machine, limits: &Limits) -> Result<Report> {
    let Scenario { algorithm, shape, .. } = *call;
    let fail = |detail: String| Err(Error::invalid("simulate", detail));
    if algorithm == Algorithm::Hierarchical {
        return simulate_on(call, &machine.hosts(shape.ranks), machine, limits);
    }
    if !supports(algorithm, &shape) {
        return fail(format!("{algorithm} has no schedule for {} on {} ranks", shape.collective, shape.ranks));
    }
    if shape.ranks > machine.ranks() {
        return fail(format!("{} has {} ranks, {} were asked for", machine.name(), machine.ranks(), shape.ranks));
    }
    let per_window = messages_per_window(algorithm, &shape);
    let windows = call.windows().unwrap_or(1);
    let messages = per_window.saturating_mul(windows as u64);
    let read = |rank| {
        algorithm::program(algorithm, &shape, rank).map(Cow::Owned).ok_or_else(|| {
            let what = format!("{algorithm} has no schedule for {} on {} ranks", shape.collective, shape.ranks);
            Error::invalid("simulate", what)
        })
    };
    let cut = Cut { count: call.count, elem_size: call.elem_size, max_message: call.max_message };
    if messages <= limits.all_ranks {
        let system = System::build(shape.ranks, read, cut, machine, None, Lengths::Exact)?;
        return engine::run(&system).map(|run| Report::new(&system, machine, run, Method::all(shape.ranks)));
    }
    // A ring's program has as many steps as there are ranks, so only some ranks' programs are read.
    let fold = Translation::of(algorithm, &shape).and_then(|t| Some((t, machine.period(t, shape.ranks)?)));
    let looked_at = fold.map_or(per_window, |(_, block)| per_window / shape.ranks as u64 * block as u64);
    if looked_at > limits.steps.saturating_mul(if fold.is_some() { 16 } else { 1 }) {
        return fail(format!(
            "{algorithm} on {} ranks has {messages} messages, {looked_at} of them in a window of ranks that differ on {}; at most {} can be \
             simulated: take fewer ranks, or another algorithm",
            shape.ranks,
            machine.name(),
            limits.steps
        ));
    }
    let system = System::build(shape.ranks, read, cut, machine, fold, Lengths::Equal)?;
    let classes = system.ranks.len();
    let folded = (classes < shape.ranks).then_some(classes);
    let system = refine::refine(system);
    let refined = (system.ranks.len() < classes).then_some(system.ranks.len());
    let mut method = Method { ranks: shape.ranks, folded, refined, extrapolated: None };
    if system.messages() <= limits.messages {
        return engine::run(&system).map(|run| Report::new(&system, machine, run, method));
    }
    let (run, extrapolated) =
        steady::run(&system, limits.messages).map_err(|detail| Error::invalid("simulate", detail))?;
    method.extrapolated = Some(extrapolated);
    Ok(Report::new(&system, machine, run, method))
}

/// Simulates a call as ranks on these hosts make it: [hierarchical], or with the ranks
/// of a host one after the other.
///
/// # Errors
/// As [`simulate`]; every message is simulated where the hosts matter.
pub fn simulate_on(call: &Scenario, hosts: &Hosts, machine: &dyn Machine, limits: &Limits) -> Result<Report> {
    let Scenario { algorithm, shape, count, elem_size, max_message } = *call;
    let shape = match algorithm {
        Algorithm::Hierarchical => hierarchical::widened(&shape, hosts, count.saturating_mul(elem_size), max_message),
        _ if hosts.order().is_none() => return simulate(call, machine, limits),
        _ => shape,
    };
    let programs: Option<Vec<Program>> =
        (0..shape.ranks).map(|rank| algorithm::program_on(algorithm, &shape, hosts, rank)).collect();
    let Some(programs) = programs else {
        let what = format!(
            "{algorithm} has no schedule for {} on {} ranks of {}",
            shape.collective,
            shape.ranks,
            machine.name()
        );
        return Err(Error::invalid("simulate", what));
    };
    simulate_programs(&programs, Cut { count, elem_size, max_message }, machine, limits)
}

/// Simulates a call by a schedule of the caller's making: every message of every rank.
///
/// # Errors
/// [`Error::InvalidArgument`] when the machine has too few ranks, or there are more messages than `limits.messages`.
pub fn simulate_schedule(schedule: &Schedule, cut: Cut, machine: &dyn Machine, limits: &Limits) -> Result<Report> {
    let cut = Cut { max_message: schedule.message(cut.max_message), ..cut };
    simulate_programs(schedule.programs(), cut, machine, limits)
}

fn simulate_programs(programs: &[Program], cut: Cut, machine: &dyn Machine, limits: &Limits) -> Result<Report> {
    let ranks: Vec<usize> = (0..programs.len()).collect();
    simulate_together(&[(&ranks, programs)], cut, machine, limits)
}

/// Simulates calls of several groups of ranks that begin at the same time: the ranks of each, named by their numbers in
/// the machine, and their programs. All segments have the length of `cut`.
///
/// # Errors
/// [`Error::InvalidArgument`] for a rank that the machine does not have or that is in two groups, and for more messages
/// than `limits.messages`.
pub fn simulate_together(
    groups: &[(&[usize], &[Program])],
    cut: Cut,
    machine: &dyn Machine,
    limits: &Limits,
) -> Result<Report> {
    let fail = |detail: String| Err(Error::invalid("simulate", detail));
    // Programs of different numbers of parts are cut alike where a part of one is several of that.
    let parts = groups.iter().filter_map(|(_, programs)| programs.first()).fold(1, |all, one| lcm(all, one.parts));
    let span = groups.iter().flat_map(|(_, programs)| *programs).map(|one| one.span * (parts / one.parts.max(1))).max();
    let most = groups.iter().flat_map(|(ranks, _)| *ranks).max().map_or(0, |most| most + 1);
    if most > machine.ranks() {
        return fail(format!("{} has {} ranks, {most} were asked for", machine.name(), machine.ranks()));
    }
    let mut all: Vec<Option<Cow<'_, Program>>> = vec![None; most];
    for (members, programs) in groups {
        let alone = groups.len() == 1 && members.iter().enumerate().all(|(at, &rank)| at == rank);
        for (&rank, program) in members.iter().zip(*programs) {
            let placed = match alone {
                true => Cow::Borrowed(program),
                false => Cow::Owned(placed(program, members, parts, span.unwrap_or(1))),
            };
            if all[rank].replace(placed).is_some() {
                return fail(format!("rank {rank} is in two groups"));
            }
        }
    }
    let idle = Program { parts, span: span.unwrap_or(1), scratch_segments: 0, lanes: vec![] };
    let read = |rank: usize| Ok(all[rank].as_deref().map_or(Cow::Borrowed(&idle), Cow::Borrowed));
    let system = System::build(most, read, cut, machine, None, Lengths::Exact)?;
    let messages = system.messages();
    if messages > limits.messages {
        return fail(format!("the schedule sends {messages} messages, at most {} can be simulated", limits.messages));
    }
    engine::run(&system).map(|run| Report::new(&system, machine, run, Method::all(most)))
}

/// A program of a group's rank with the ranks' numbers in the machine, and parts that are cut into more.
fn placed(program: &Program, members: &[usize], parts: usize, span: usize) -> Program {
    let each = (parts / program.parts.max(1)) as u32;
    let loc = |loc: Loc| Loc { part: loc.part * each, span: loc.span * each, ..loc };
    let mut program = Program { parts, span, ..program.clone() };
    for step in program.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
        let rank = |peer: u32| Ok::<_, Infallible>(members.get(peer as usize).map_or(peer, |&rank| rank as u32));
        let Ok(placed) = step.map(rank, loc);
        *step = placed;
    }
    program
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a.max(1), b.max(1));
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.max(1) / x * b.max(1)
}

impl Scenario {
    /// Windows that the segments are cut into.
    fn windows(&self) -> Option<usize> {
        let (parts, span) = crate::algorithm::cut(self.algorithm, &self.shape)?;
        Some(crate::schedule::Partition::new(self.count, self.elem_size, parts, self.max_message / span).windows())
    }
}

/// Messages of all ranks in one window, as the cost model counts them.
fn messages_per_window(algorithm: Algorithm, shape: &Shape) -> u64 {
    let mean = terms::work(algorithm, shape).map_or(0.0, |work| work.mean.messages / 2.0);
    (mean * shape.ranks as f64).round() as u64
}
