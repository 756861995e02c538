//! Training that goes on without ranks that are lost: `--elastic`.
//!
//! ```text
//!   a call fails ─▶ revoke: every rank's calls end ─▶ shrink: the ranks that live, numbered anew
//!                ─▶ align: the state of the rank with the most steps ─▶ the batch is divided anew, training goes on
//! ```
//! Parameters and optimizer change only after the last call of a step. So the ranks that are left have done the same
//! steps, or some of them one more: those have seen every rank's gradients, and the others take their state. A step
//! that no rank has finished is repeated.

use anyhow::{Result, anyhow};
use tinynccl::Comm;

use crate::checkpoint::Point;
use crate::train::{Plan, State, agree};

/// The communicator of the ranks that live, after `error` of a call. Other errors are returned.
pub fn shrink(comm: &Comm, error: anyhow::Error) -> Result<Comm> {
    if comm.failure().is_none() {
        return Err(error);
    }
    comm.revoke()?;
    comm.shrink().map_err(|shrink| anyhow!("{error:#}; the ranks that are left do not go on: {shrink}"))
}

/// Brings `state` to that of the rank with the most steps, on every rank. Returns the checksum of the parameters.
pub fn align(state: &mut State, comm: &Comm) -> Result<u32> {
    let ours = [state.step as u64, state.history.len() as u64, state.adamw.updates as u64];
    let mut all = vec![0; 3 * comm.size()];
    comm.all_gather(&ours, &mut all)?;
    let first_of_most = |(rank, facts): &(usize, &[u64])| (facts[0], std::cmp::Reverse(*rank));
    let Some((root, &[step, points, updates])) = all.chunks(3).enumerate().max_by_key(first_of_most) else {
        return Err(anyhow!("no rank"));
    };
    let mut history: Vec<f64> = state.history.iter().flat_map(flat).collect();
    history.resize(3 * points as usize, 0.0);
    comm.broadcast_in_place(&mut history, root)?;
    for values in [&mut state.model.values, &mut state.adamw.mean, &mut state.adamw.square] {
        comm.broadcast_in_place(values, root)?;
    }
    (state.step, state.adamw.updates) = (step as usize, updates as usize);
    state.history = history.chunks(3).filter_map(point).collect();
    same_parameters(state, comm)
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
