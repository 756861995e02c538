//! Schedules for a machine's own links: trees that are packed so that no link is much fuller than the others.
//!
//! | file | idea |
//! |---|---|
//! | this one | the fastest of several packings |
//! | `choice` | which packing, over how many channels, by messages of which length |
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
mod choice;
#[cfg(test)]
mod groups_tests;
mod order;
mod placed;
mod programs;
#[cfg(test)]
mod tests;
mod trees;

pub use self::choice::of_long;
pub use self::placed::place;
use self::programs::{Packing, Way};
use self::trees::{Group, Routes, Tree};
use super::Cut;
use super::machine::Machine;
use crate::error::{Error, Result};
use crate::schedule::{Program, Schedule, Shape};
use crate::wire::Collective;

/// The ways of sums and of copies, each by group.
type Both = (Option<Vec<Way>>, Option<Vec<Way>>);

/// Most ranks of a packing.
pub const MOST_RANKS: usize = 24;
/// Trees of each root that are tried: more trees follow the links' bandwidths more closely.
const TREES: [usize; 5] = [1, 2, 3, 4, 8];
/// Most trees of a packing with more than one tree of a root.
const MOST_TREES: usize = 128;

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
    let (channels, longest, time, programs) = choice::fastest(&packings, programs, machine, &groups, cut)?;
    let (shape, programs) = (Shape { channels, ..*shape }, programs.into_iter().nth(ours).unwrap_or_default());
    let schedule = Schedule::new(shape, programs).map_err(|error| Error::invalid("pack", error.to_string()))?;
    Ok((schedule.with_message(longest), time))
}
