//! Training that goes on without ranks that are lost, and with spares in their places: `--elastic --spare N`.
//!
//! ```text
//!   a call fails ─▶ revoke: every rank's calls end ─▶ grow: the ranks that live, and spares that wait, numbered anew
//!                ─▶ align: the state of the rank with the most steps ─▶ the batch is divided anew, training goes on
//! ```
//! Parameters and optimizer change only after the last call of a step. So the ranks that are left have done the same
//! steps, or some of them one more: those have seen every rank's gradients, and the others take their state. A step
//! that no rank has finished is repeated.

use std::fmt;

use anyhow::{Result, anyhow};
use tinynccl::{Comm, Error, ReduceOp, Ticket};

use crate::checkpoint::Point;
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

/// Brings `state` to that of the rank with the most steps, on every rank. Returns the checksum of the parameters;
/// `None` if that rank has `finished`, and nothing is brought.
pub fn align(state: &mut State, comm: &Comm, finished: bool) -> Result<Option<u32>> {
    let ours = [state.step as u64, state.history.len() as u64, state.adamw.updates as u64, finished.into()];
    let mut all = vec![0; 4 * comm.size()];
    comm.all_gather(&ours, &mut all)?;
    let first_of_most = |(rank, facts): &(usize, &[u64])| (facts[0], std::cmp::Reverse(*rank));
    let Some((root, &[step, points, updates, finished])) = all.chunks(4).enumerate().max_by_key(first_of_most) else {
        return Err(anyhow!("no rank"));
    };
    if finished == 1 {
        return Ok(None);
    }
    let mut history: Vec<f64> = state.history.iter().flat_map(flat).collect();
    history.resize(3 * points as usize, 0.0);
    comm.broadcast_in_place(&mut history, root)?;
    for values in [&mut state.model.values, &mut state.adamw.mean, &mut state.adamw.square] {
        comm.broadcast_in_place(values, root)?;
    }
    (state.step, state.adamw.updates) = (step as usize, updates as usize);
    state.history = history.chunks(3).filter_map(point).collect();
    same_parameters(state, comm).map(Some)
}

/// Fails unless the parameters are the same on all ranks. Returns their checksum.
pub fn same_parameters(state: &State, comm: &Comm) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    state.model.values.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
    let crc = hasher.finalize();
    agree(comm, "the checksum of the parameters", crc)?;
    Ok(crc)
}

/// The plan for `ranks` ranks: the largest part of the batch that they can share evenly.
pub fn replan(plan: &Plan, ranks: usize) -> Plan {
    let mut plan = plan.clone();
    plan.config.batch = (plan.config.batch / ranks).max(1) * ranks;
    plan
}

fn flat(point: &Point) -> [f64; 3] {
    [point.step as f64, point.train.unwrap_or(f64::NAN), point.validation.unwrap_or(f64::NAN)]
}

fn point(flat: &[f64]) -> Option<Point> {
    let &[step, train, validation] = flat else { return None };
    let some = |value: f64| Some(value).filter(|value| !value.is_nan());
    Some(Point { step: step as usize, train: some(train), validation: some(validation) })
}
