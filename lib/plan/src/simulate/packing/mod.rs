//! Schedules for a machine's own links: trees that are packed so that no link is much fuller than the others.
//!
//! | file | idea |
//! |---|---|
//! | this one | the fastest of several packings |
//! | `placed` | the library's algorithms, with the ranks where they suit the links |
//! | `trees` | which trees |
//! | `arborescence` | the cheapest tree |
//! | `order` | when each message goes |
//! | `programs` | the steps of each rank |
//! | `tests` | packings beside the [bound](super::bound) |
//! | `groups_tests` | several groups at the same time |
//!
//! Blink (Wang et al., MLSys 2020) packs spanning trees for broadcasts and all_reduces, ForestColl (arXiv 2402.06787)
//! for all collectives below. Both pack for flows that may take any path; messages here take the machine's routes.

mod arborescence;
#[cfg(test)]
mod groups_tests;
mod order;
mod placed;
mod programs;
#[cfg(test)]
mod tests;
mod trees;

pub use self::placed::place;
use self::programs::{Packing, Way};
use self::trees::{Group, Routes, Tree};
use super::machine::Machine;
use super::{Cut, Limits, simulate_together};
use crate::error::{Error, Result};
use crate::schedule::{Program, Schedule, Shape};
use crate::wire::Collective;

/// The ways of sums and of copies, each by group.
type Both = (Option<Vec<Way>>, Option<Vec<Way>>);

/// Most ranks of a packing.
pub const MOST_RANKS: usize = 64;
/// Trees of each root that are tried: more trees follow the links' bandwidths more closely.
const TREES: [usize; 5] = [1, 2, 3, 4, 8];
/// Most trees of a packing with more than one tree of a root.
const MOST_TREES: usize = 128;
/// Numbers of channels that are tried. Trees of two channels do not wait for each other, but they share the links.
const CHANNELS: [usize; 4] = [1, 2, 4, 8];
/// Longest messages that are tried are halves of the longest one, down to this many bytes: the first message of a long
/// tree arrives sooner, but each takes time of both ends' processors, which descriptions seldom have.
const SHORTEST: usize = 32 << 10;
/// Messages of a segment that are simulated, at most and at least, and those of all ranks at most.
const SIMULATED: [usize; 2] = [16, 4];
const ALL_SIMULATED: usize = 30_000;
/// Gain that pays for more channels or shorter messages.
const GAIN: f64 = 1.03;

/// The schedule of packed trees that is predicted to be the fastest for `shape` on `machine`, cut as `cut` says, over
/// its own number of channels and with its own longest message. Reductions are not in rank order.
///
/// # Errors
/// [`Error::InvalidArgument`] for other collectives than all_reduce, all_gather, reduce_scatter, broadcast and reduce,
/// and for fewer than two or more than [`MOST_RANKS`] ranks, or more than the machine has.
pub fn pack(machine: &dyn Machine, shape: &Shape, cut: Cut) -> Result<Schedule> {
    pack_beside(machine, &[(0..shape.ranks).collect()], 0, shape, cut).map(|(schedule, _)| schedule)
}

/// [`pack`] for `groups[mine]`, whose ranks these are of the machine, while each other group makes the same call: the
/// trees of all groups share the links, and the time at which the last group is done decides. It is returned with the
/// schedule, in seconds. Every group finds the same packing of all, so each takes its own part of it.
///
/// # Errors
/// As [`pack`]; `shape` is that of `groups[mine]`. Other groups of one rank are no burden.
pub fn pack_beside(
    machine: &dyn Machine,
    groups: &[Vec<usize>],
    mine: usize,
    shape: &Shape,
    cut: Cut,
) -> Result<(Schedule, f64)> {
    let wrong = |detail: String| Err(Error::invalid("pack", detail));
    let fits = groups.get(mine).is_some_and(|ranks| ranks.len() == shape.ranks);
    let known = groups.iter().flatten().all(|&rank| rank < machine.ranks());
    let most = MOST_RANKS.min(machine.ranks());
    if !fits || !known || !(2..=MOST_RANKS).contains(&shape.ranks) {
        return wrong(format!("expected 2 to {most} ranks on {}, got {}", machine.name(), shape.ranks));
    }
    // Those who send something, and our place among them.
    let busy = |ranks: &&Vec<usize>| (2..=MOST_RANKS).contains(&ranks.len());
    let ours = groups.iter().take(mine).filter(busy).count();
    let groups: Vec<Vec<usize>> = groups.iter().filter(busy).cloned().collect();
    let largest = groups.iter().map(Vec::len).max().unwrap_or(0);
    let [out, back] = [false, true].map(|reversed| Routes::of(machine, &groups, reversed));
    let both: Vec<Routes> = out.iter().map(Routes::both_ways).collect();
    let all = |ranks: usize| (0..ranks).collect::<Vec<_>>();
    let mut packings = Vec::new();
    for each in TREES.into_iter().filter(|&each| each == 1 || each * largest <= MOST_TREES) {
        let trees = |routes: &[Routes], roots: &dyn Fn(usize) -> Vec<usize>, bytes: &dyn Fn(usize) -> f64| {
            let group = |routes| {
                let &Routes { ranks, .. } = routes;
                let roots = roots(ranks).into_iter().flat_map(|root| std::iter::repeat_n(root, each)).collect();
                Group { routes, roots, bytes: bytes(ranks) }
            };
            trees::choose(&routes.iter().map(group).collect::<Vec<_>>())
        };
        let ordered = |routes: &[Routes], trees: Vec<Vec<Tree>>| -> Vec<Way> {
            let way = |(routes, trees): (&Routes, Vec<Tree>)| Way { messages: order::messages(routes, &trees), trees };
            routes.iter().zip(trees).map(way).collect()
        };
        let root = |ranks: usize| vec![shape.root.min(ranks - 1)];
        let alike = |_: usize| 1.0;
        // A tree for each rank carries a part of a segment; one of all_reduce a part of the buffer.
        let parts = |ranks: usize| largest as f64 / ranks as f64;
        let ways = match shape.collective {
            Collective::AllGather => vec![(None, Some(ordered(&out, trees(&out, &all, &alike))))],
            Collective::ReduceScatter => vec![(Some(ordered(&back, trees(&back, &all, &alike))), None)],
            Collective::Broadcast => vec![(None, Some(ordered(&out, trees(&out, &root, &alike))))],
            Collective::Reduce => vec![(Some(ordered(&back, trees(&back, &root, &alike))), None)],
            Collective::AllReduce => {
                let few = trees(&both, &|_| vec![0], &alike).into_iter().map(trees::centred).collect();
                let few = ordered(&out, few);
                let many = [&back, &out].map(|routes| ordered(routes, trees(routes, &all, &parts)));
                let [home, there] = many;
                vec![(Some(home), Some(there)), (Some(few.clone()), Some(few))]
            }
            other => return wrong(format!("there are no packed trees for {other}")),
        };
        packings.extend(ways.into_iter().map(|way| (each, way)));
    }
    let programs = |(each, (home, there)): &(usize, Both), channels: usize| {
        let programs = |group: usize| {
            let ranks = groups[group].len();
            let shape = Shape { channels, ranks, root: shape.root.min(ranks - 1), ..*shape };
            let [home, there] = [home, there].map(|ways| ways.as_ref().map(|ways| &ways[group]));
            Packing { shape: &shape, each: *each, home, there }.programs()
        };
        (0..groups.len()).map(programs).collect::<Vec<Vec<Program>>>()
    };
    let time = |programs: &[Vec<Program>], cut: Cut| {
        let pairs = groups.iter().zip(programs);
        let calls: Vec<(&[usize], &[Program])> = pairs.map(|(ranks, programs)| (&**ranks, &**programs)).collect();
        simulate_together(&calls, cut, machine, &Limits::default()).map(|report| report.time)
    };
    // Messages short enough that pipelining does not hide how full the links are. A longer call takes as much longer,
    // whatever the packing is.
    let message = (cut.max_message / 4).max(SHORTEST).min(cut.max_message);
    let [most, least] = SIMULATED;
    let at_once: usize = groups.iter().map(|ranks| ranks.len() * ranks.len()).sum();
    let windows = (ALL_SIMULATED / at_once.max(1)).clamp(least, most);
    let short = |message: usize| Cut {
        count: cut.count.min(windows * message / cut.elem_size.max(1)),
        max_message: message,
        ..cut
    };
    let mut found: Option<(f64, usize, Vec<Vec<Program>>)> = None;
    for (channels, packing) in CHANNELS.into_iter().flat_map(|channels| packings.iter().map(move |one| (channels, one)))
    {
        let programs = programs(packing, channels);
        let time = time(&programs, short(message))?;
        let gain = if found.as_ref().is_some_and(|(_, fewest, _)| channels > *fewest) { GAIN } else { 1.0 };
        if found.as_ref().is_none_or(|(least, ..)| time * gain < *least) {
            found = Some((time, channels, programs));
        }
    }
    let Some((_, channels, programs)) = found else { return wrong("no packing was tried".to_owned()) };
    // The longest message first.
    let mut best: Option<(f64, usize)> = None;
    let halves = (0..usize::BITS).map(|halvings| cut.max_message >> halvings);
    for longest in halves.take_while(|&longest| longest >= SHORTEST || longest == cut.max_message) {
        let time = time(&programs, Cut { max_message: longest, ..short(cut.max_message) })?;
        if best.is_none_or(|(least, _)| time * GAIN < least) {
            best = Some((time, longest));
        }
    }
    let longest = best.map_or(cut.max_message, |(_, longest)| longest);
    // The time of the whole call, from those of two shorter ones.
    let of = |count: usize| time(&programs, Cut { count, max_message: longest, ..cut });
    let Cut { count: long, .. } = short(cut.max_message);
    let time = match cut.count > long {
        true => {
            let [half, whole] = [of(long / 2)?, of(long)?];
            whole + (whole - half) * (cut.count - long) as f64 / (long - long / 2) as f64
        }
        false => of(cut.count)?,
    };
    let (shape, programs) = (Shape { channels, ..*shape }, programs.into_iter().nth(ours).unwrap_or_default());
    let schedule = Schedule::new(shape, programs).map_err(|error| Error::invalid("pack", error.to_string()))?;
    Ok((schedule.with_message(longest), time))
}
