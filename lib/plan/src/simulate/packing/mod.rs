//! Schedules for a machine's own links: trees that are packed so that no link is much fuller than the others.
//!
//! | file | idea |
//! |---|---|
//! | this one | the fastest of several packings |
//! | `trees` | which trees |
//! | `arborescence` | the cheapest tree |
//! | `order` | when each message goes |
//! | `programs` | the steps of each rank |
//! | `tests` | packings beside the [bound](super::bound) |
//!
//! Blink (Wang et al., MLSys 2020) packs spanning trees for broadcasts and all_reduces, ForestColl (arXiv 2402.06787)
//! for all collectives below. Both pack for flows that may take any path; messages here take the machine's routes.

mod arborescence;
mod order;
mod programs;
#[cfg(test)]
mod tests;
mod trees;

use self::programs::{Packing, Way};
use self::trees::Routes;
use super::machine::Machine;
use super::{Cut, Limits, simulate_schedule};
use crate::error::{Error, Result};
use crate::schedule::{Schedule, Shape};
use crate::wire::Collective;

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
/// Messages of a segment that are simulated.
const SIMULATED: usize = 64;
/// Gain that pays for more channels or shorter messages.
const GAIN: f64 = 1.03;

/// The schedule of packed trees that is predicted to be the fastest for `shape` on `machine`, cut as `cut` says, over
/// its own number of channels, with its own longest message. Reductions are not in rank order.
///
/// # Errors
/// [`Error::InvalidArgument`] for other collectives than all_reduce, all_gather, reduce_scatter, broadcast and reduce,
/// and for fewer than two or more than [`MOST_RANKS`] ranks, or more than the machine has.
pub fn pack(machine: &dyn Machine, shape: &Shape, cut: Cut) -> Result<Schedule> {
    let wrong = |detail: String| Err(Error::invalid("pack", detail));
    let ranks = shape.ranks;
    if !(2..=MOST_RANKS).contains(&ranks) || ranks > machine.ranks() {
        let most = MOST_RANKS.min(machine.ranks());
        return wrong(format!("expected 2 to {most} ranks on {}, got {ranks}", machine.name()));
    }
    let [out, back] = [false, true].map(|reversed| Routes::new(machine, ranks, reversed));
    let all: Vec<usize> = (0..ranks).collect();
    // Short enough that pipelining does not hide how full the links are.
    let message = (cut.max_message / 4).max(SHORTEST).min(cut.max_message);
    // A longer call takes as much longer, whatever the packing is.
    let count = cut.count.min(SIMULATED * message / cut.elem_size.max(1));
    let mut best = Best { machine, cut: Cut { count, ..cut }, found: None };
    let mut packings = Vec::new();
    for each in TREES.into_iter().filter(|&each| each == 1 || each * ranks <= MOST_TREES) {
        let way = |routes: &Routes, roots: &[usize]| {
            let roots: Vec<usize> = roots.iter().flat_map(|&root| std::iter::repeat_n(root, each)).collect();
            let trees = trees::choose(routes, &roots);
            let messages = order::messages(routes, &trees);
            Way { trees, messages }
        };
        let ways = match shape.collective {
            Collective::AllGather => vec![(None, Some(way(&out, &all)))],
            Collective::ReduceScatter => vec![(Some(way(&back, &all)), None)],
            Collective::Broadcast => vec![(None, Some(way(&out, &[shape.root])))],
            Collective::Reduce => vec![(Some(way(&back, &[shape.root])), None)],
            Collective::AllReduce => {
                let trees = trees::centred(trees::choose(&out.both_ways(), &vec![0; each]));
                let messages = order::messages(&out, &trees);
                let few = Way { trees, messages };
                vec![(Some(way(&back, &all)), Some(way(&out, &all))), (Some(few.clone()), Some(few))]
            }
            other => return wrong(format!("there are no packed trees for {other}")),
        };
        packings.extend(ways.into_iter().map(|way| (each, way)));
    }
    let schedule = |(each, (home, there)): &(usize, (Option<Way>, Option<Way>)), channels: usize| {
        let shape = Shape { channels, ..*shape };
        let packing = Packing { shape: &shape, each: *each, home: home.as_ref(), there: there.as_ref() };
        Schedule::new(shape, packing.programs()).map_err(|error| Error::invalid("pack", error.to_string()))
    };
    for channels in CHANNELS {
        let fewest = best.found.as_ref().map_or(channels, |(_, schedule)| schedule.shape().channels);
        for packing in &packings {
            let gain = if channels > fewest { GAIN } else { 1.0 };
            best.take(schedule(packing, channels)?.with_message(message), gain)?;
        }
    }
    let Some((_, found)) = best.found.clone() else { return wrong("no packing was tried".to_owned()) };
    let halves = (0..usize::BITS).map(|halvings| cut.max_message >> halvings);
    for longest in halves.take_while(|&longest| longest >= SHORTEST) {
        let gain = if longest > message { 1.0 / GAIN } else { GAIN };
        best.take(found.clone().with_message(longest), gain)?;
    }
    best.found.map(|(_, schedule)| schedule).ok_or_else(|| Error::invalid("pack", "no packing was tried"))
}

/// The fastest schedule so far.
struct Best<'a> {
    machine: &'a dyn Machine,
    cut: Cut,
    found: Option<(f64, Schedule)>,
}

impl Best<'_> {
    /// Takes a schedule that is faster than the one so far by this factor.
    fn take(&mut self, schedule: Schedule, gain: f64) -> Result<()> {
        let time = simulate_schedule(&schedule, self.cut, self.machine, &Limits::default())?.time;
        if self.found.as_ref().is_none_or(|(least, _)| time * gain < *least) {
            self.found = Some((time, schedule));
        }
        Ok(())
    }
}
