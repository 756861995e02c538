//! Training that goes on without ranks that are lost, and with spares in their places: `--elastic --spare N`.
//!
//! ```text
//!   a call fails ─▶ revoke: every rank's calls end ─▶ grow: the ranks that live, and spares that wait, numbered anew
//!                ─▶ align: the newest state on all of them ─▶ the batch is divided anew, training goes on
//! ```
//! Parameters and optimizer change only after the last call of a step. So the ranks that are left have done the same
//! steps, or some of them one more: those have seen every rank's gradients, and the others take their state. A step
//! that no rank has finished is repeated.

use std::fmt;

use anyhow::{Result, anyhow};
use tinynccl::{Comm, Error, ReduceOp, SharedState, Ticket};

use crate::train::{Plan, State, agree};

/// Longest text of a ticket.
const TICKET: usize = 4096;

/// Ends the steps of a group that has room: a spare waits.
#[derive(Debug)]
pub struct SpareWaits;

impl fmt::Display for SpareWaits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a spare takes a place that is free")
    }
}

impl std::error::Error for SpareWaits {}

/// Divides a job into the ranks that train and, at the end, `spares` that wait. Gives a rank its communicator, and a
/// spare the ticket with which it joins.
pub fn divide(world: &Comm, spares: usize) -> Result<std::result::Result<Comm, Ticket>> {
    let mut text = if world.rank() == 0 { world.ticket()?.to_string().into_bytes() } else { Vec::new() };
    text.resize(TICKET, b' ');
    world.broadcast_in_place(&mut text, 0)?;
    let trains = world.rank() + spares < world.size();
    Ok(match world.split(trains.then_some(0), 0)? {
        Some(comm) => Ok(comm),
        None => Err(String::from_utf8(text)?.parse()?),
    })
}

/// The communicator of the ranks that live and of spares, up to `size`, after `error` of a call or [`SpareWaits`].
/// Other errors are returned.
pub fn regroup(comm: &Comm, error: anyhow::Error, size: usize) -> Result<Comm> {
    if comm.failure().is_some() {
        comm.revoke()?;
    } else if !error.is::<SpareWaits>() {
        return Err(error);
    }
    comm.grow(size).map_err(|grow| anyhow!("{error:#}; the ranks that are left do not go on: {grow}"))
}

/// Takes in the spares that still wait, so that they find that nothing is left to do.
pub fn dismiss_spares(state: &mut State, comm: &Comm) -> Result<()> {
    if spares_wait(comm)? {
        let all = comm.grow(usize::MAX)?;
        align(state, &all, true)?;
        all.close()?;
    }
    Ok(())
}

/// Returns true, on all ranks, if spares wait.
pub fn spares_wait(comm: &Comm) -> Result<bool, Error> {
    let mut waiting = [comm.waiting() as u64];
    comm.all_reduce_in_place(&mut waiting, ReduceOp::Sum)?;
    Ok(waiting[0] > 0)
}

/// Brings `state` to the newest one of all ranks, on every rank. Returns the checksum of the parameters; `None` if a
/// rank has `finished`, and nothing is brought.
pub fn align(state: &mut State, comm: &Comm, finished: bool) -> Result<Option<u32>> {
    let mut finished = [u64::from(finished)];
    comm.all_reduce_in_place(&mut finished, ReduceOp::Max)?;
    if finished[0] == 1 {
        return Ok(None);
    }
    // A point for each step, and one more after the last.
    let mut revision = Some(state.history.len() as u64);
    // A copy: if the rank with the newest state dies meanwhile, ours is still whole.
    let mut next = state.clone();
    let mut rest = serde_json::to_vec(&(state.step, state.adamw.updates, &state.history))?;
    let outcome = SharedState::new(&mut revision)
        .buffer("parameters", &mut next.model.values)
        .buffer("means", &mut next.adamw.mean)
        .buffer("squares", &mut next.adamw.square)
        .vec("counters and losses", &mut rest)
        .synchronize(comm)?;
    (next.step, next.adamw.updates, next.history) = serde_json::from_slice(&rest)?;
    *state = next;
    if !outcome.differing.is_empty() {
        let (ranks, step) = (outcome.differing, state.step);
        log::warn!("ranks {ranks:?} had other bits than the rest after {step} steps: check their memory");
    }
    Ok(Some(checksum(state)))
}

/// Fails unless the parameters are the same on all ranks. Returns their checksum.
pub fn same_parameters(state: &State, comm: &Comm) -> Result<u32> {
    let crc = checksum(state);
    agree(comm, "the checksum of the parameters", crc)?;
    Ok(crc)
}

fn checksum(state: &State) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    state.model.values.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
    hasher.finalize()
}

/// The plan for `ranks` ranks: the largest part of the batch that they can share evenly.
pub fn replan(plan: &Plan, ranks: usize) -> Plan {
    let mut plan = plan.clone();
    plan.config.batch = (plan.config.batch / ranks).max(1) * ranks;
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Point;
    use crate::config::Preset;
    use tinynccl::Config;

    /// Aligns ranks of which the last one differs from the others in a bit. Returns the outcome of each.
    fn aligned(ranks: usize, steps: &[usize]) -> Vec<Result<State>> {
        let comms = Comm::threads(ranks, Config::default()).unwrap();
        let rank = |comm: &Comm| {
            let mut state = State::new(Preset::Tiny.model(3), 1);
            state.step = steps[comm.rank()];
            state.history = (0..state.step).map(|step| Point { step, train: Some(0.1), validation: None }).collect();
            state.model.values[7] += if comm.rank() + 1 == ranks { 1.0 } else { 0.0 };
            align(&mut state, comm, false).map(|_| state)
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_newest_state_comes_to_all_and_of_equally_new_ones_that_of_the_most_ranks() {
        let right = State::new(Preset::Tiny.model(3), 1).model.values;
        for (steps, last) in [([4, 4, 5], true), ([5, 5, 4], false), ([5, 5, 5], false)] {
            for state in aligned(3, &steps) {
                let state = state.unwrap();
                assert_eq!((state.step, state.history.len()), (5, 5));
                assert_eq!(state.model.values != right, last, "{steps:?}");
            }
        }
    }

    #[test]
    fn two_ranks_that_differ_silently_are_an_error() {
        for error in aligned(2, &[5, 5]) {
            assert!(error.unwrap_err().to_string().contains("ranks [0] and ranks [1] have different contents"));
        }
    }
}
