//! The library's algorithms with the ranks in an order that suits a machine's links, and hierarchical on its hosts.

use super::MOST_RANKS;
use super::choice::of_long;
use crate::algorithm::{Hosts, hierarchical, program_in_order, program_on, supports};
use crate::error::{Error, Result};
use crate::schedule::{Program, Schedule, Shape};
use crate::simulate::machine::Machine;
use crate::simulate::ring_order::ring_order;
use crate::simulate::{Cut, Limits, simulate_together};
use crate::wire::Algorithm;

/// Algorithms whose neighbours in the order talk to each other.
const ORDERED: [Algorithm; 4] =
    [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::DoubleTree, Algorithm::RecursiveDoubling];

/// The fastest of the library's algorithms on `machine` that is none of those in rank order, with its predicted
/// seconds: in the [order for rings](ring_order), or hierarchical. `None` where no order is better than that of the
/// numbers and no host has several ranks.
///
/// # Errors
/// [`Error::InvalidArgument`] for more than [`MOST_RANKS`] ranks, or if there is too much to simulate.
pub fn place(machine: &dyn Machine, shape: &Shape, cut: Cut) -> Result<Option<(Algorithm, f64, Schedule)>> {
    if shape.ranks > MOST_RANKS {
        let detail = format!("expected at most {MOST_RANKS} ranks on {}, got {}", machine.name(), shape.ranks);
        return Err(Error::invalid("place", detail));
    }
    let each = |program: &dyn Fn(usize) -> Option<Program>| (0..shape.ranks).map(program).collect::<Option<Vec<_>>>();
    let mut candidates: Vec<(Algorithm, Shape, Vec<Program>)> = Vec::new();
    if let Some(order) = ring_order(machine, shape.ranks) {
        for algorithm in ORDERED.into_iter().filter(|&algorithm| supports(algorithm, shape)) {
            let programs = each(&|rank| program_in_order(algorithm, shape, &order, rank));
            candidates.extend(programs.map(|programs| (algorithm, *shape, programs)));
        }
    }
    let hosts: Hosts = machine.hosts(shape.ranks);
    if hierarchical::supports(shape, &hosts) {
        let wide = hierarchical::widened(shape, &hosts, cut.count.saturating_mul(cut.elem_size), cut.max_message);
        let programs = each(&|rank| program_on(Algorithm::Hierarchical, &wide, &hosts, rank));
        candidates.extend(programs.map(|programs| (Algorithm::Hierarchical, wide, programs)));
    }
    let all: Vec<usize> = (0..shape.ranks).collect();
    let mut fastest: Option<(f64, Algorithm, Shape, Vec<Program>)> = None;
    for (algorithm, shape, programs) in candidates {
        let seconds =
            |cut| simulate_together(&[(&all, &programs)], cut, machine, &Limits::default()).map(|call| call.time);
        let time = of_long(cut, &programs, seconds)?;
        if fastest.as_ref().is_none_or(|(least, ..)| time < *least) {
            fastest = Some((time, algorithm, shape, programs));
        }
    }
    let Some((time, algorithm, shape, programs)) = fastest else { return Ok(None) };
    let schedule = Schedule::new(shape, programs).map_err(|error| Error::invalid("place", error.to_string()))?;
    Ok(Some((algorithm, time, schedule)))
}
