//! Training that goes on without ranks that are lost, and with spares in their places: `--elastic --spare N`.
//!
//! ```text
//!   a call fails ─▶ revoke: every rank's calls end ─▶ grow: the ranks that live, and spares that wait, numbered anew
//!                ─▶ align: the newest state on all of them ─▶ the batch is divided anew, training goes on
//! ```
//! Parameters and optimizer change only after the last call of a step. So the ranks that are left have done the same
//! steps, or some of them one more: those have seen every rank's gradients, and the others take their state. A step
//! that no rank has finished is repeated.
//!
//! With local steps ([`crate::cpu::local`]) the same holds of outer steps, and what is shared is outer: parameters,
//! momentum, counters. Moments of AdamW and local steps that wait for their outer step are each rank's own.

use std::fmt;

use anyhow::{Result, anyhow};
use tinynccl::{Comm, Error, ReduceOp, SharedState, Ticket};

use crate::cpu::local::Round;
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
    let mut rest = serde_json::to_vec(&(state.step, &state.history))?;
    let shared = SharedState::new(&mut revision).buffer("parameters", &mut next.model.values);
    let shared = match &mut next.outer {
        Some(outer) => shared.buffer("outer momentum", &mut outer.momentum),
        None => shared.buffer("means", &mut next.adamw.mean).buffer("squares", &mut next.adamw.square),
    };
    let outcome = shared.vec("counters and losses", &mut rest).synchronize(comm)?;
    (next.step, next.history) = serde_json::from_slice(&rest)?;
    match next.outer {
        Some(_) => equip(&mut next, comm)?,
        None => next.adamw.updates = next.step,
    }
    *state = next;
    if !outcome.differing.is_empty() {
        let (ranks, step) = (outcome.differing, state.step);
        log::warn!("ranks {ranks:?} had other bits than the rest after {step} steps: check their memory");
    }
    Ok(Some(checksum(state)))
}

/// Gives newcomers the moments of a rank that was here.
///
/// Moments are means over many batches of the same text, so those of another rank will do. With zeros the first updates
/// have the full learning rate in every parameter, whatever the gradient: with three of four ranks new, the losses of
/// the next round were 0.06 higher, a difference that ten rounds made good. While the others have their local steps
/// behind them, a newcomer sits that round out: one idle rank costs less than all others waiting.
fn equip(state: &mut State, comm: &Comm) -> Result<()> {
    let (rank, step) = (comm.rank(), state.step as u64);
    let mut updates = vec![0; comm.size()];
    updates[rank] = state.adamw.updates as u64;
    comm.all_gather_in_place(&mut updates)?;
    // An update for each step done, and more where local steps wait for their outer step.
    let (newcomers, others): (Vec<usize>, _) = (0..comm.size()).partition(|&rank| updates[rank] < step);
    let Some(least) = others.iter().map(|&rank| updates[rank]).min() else { return Ok(()) };
    let donors = others.into_iter().filter(|&rank| updates[rank] == least);
    for (&to, from) in newcomers.iter().zip(donors.cycle()) {
        for moments in [&mut state.adamw.mean, &mut state.adamw.square] {
            if rank == from {
                comm.send(moments, to)?;
            } else if rank == to {
                comm.recv(moments, from)?;
            }
        }
    }
    if newcomers.contains(&rank) {
        state.adamw.updates = least as usize;
        state.round = (least > step).then_some(Round { step: state.step, contribution: None });
    }
    Ok(())
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
    use crate::config::{OuterConfig, Preset, TrainConfig};
    use tinynccl::Config;

    /// The state after `step` steps.
    fn after(step: usize, config: &TrainConfig) -> State {
        let mut state = State::new(Preset::Tiny.model(3), config);
        (state.step, state.adamw.updates) = (step, step);
        state.history = (0..step).map(|step| Point { step, train: Some(0.1), validation: None }).collect();
        state
    }

    /// Aligns ranks of which the last one differs from the others in a bit. Returns the outcome of each.
    fn aligned(ranks: usize, steps: &[usize]) -> Vec<Result<State>> {
        align_all((0..ranks).map(|rank| {
            let mut state = after(steps[rank], &Preset::Tiny.train());
            state.model.values[7] += if rank + 1 == ranks { 1.0 } else { 0.0 };
            state
        }))
    }

    fn align_all(states: impl IntoIterator<Item = State>) -> Vec<Result<State>> {
        let states: Vec<State> = states.into_iter().collect();
        let comms = Comm::threads(states.len(), Config::default()).unwrap();
        let rank = |comm: &Comm| {
            let mut state = states[comm.rank()].clone();
            align(&mut state, comm, false).map(|_| state)
        };
        let rank = &rank;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_newest_state_comes_to_all_and_of_equally_new_ones_that_of_the_most_ranks() {
        let right = State::new(Preset::Tiny.model(3), &Preset::Tiny.train()).model.values;
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

    /// The state of a rank with four local steps in a round, after `step` steps and, if `done`, the local ones after
    /// them. Its moments have the value `mark`.
    fn local(step: usize, done: bool, mark: f32) -> State {
        let outer = OuterConfig { local_steps: 4, lr: 0.7, momentum: 0.9 };
        let mut state = after(step, &TrainConfig { outer: Some(outer), ..Preset::Tiny.train() });
        state.model.values.fill(step as f32);
        state.outer.as_mut().unwrap().momentum.fill(step as f32);
        state.adamw.mean.fill(mark);
        state.adamw.square.fill(mark);
        if done {
            state.adamw.updates += 4;
            state.round = Some(Round { step, contribution: Some(vec![mark]) });
        }
        state
    }

    /// Mark, updates, and contribution.
    type Brief = (f32, usize, Option<Option<Vec<f32>>>);

    /// The outcome of alignment: mark and updates of AdamW, and the contribution to the round of the state's own step.
    fn brief(states: Vec<Result<State>>, step: usize) -> Vec<Brief> {
        let brief = |state: Result<State>| {
            let state = state.unwrap();
            assert_eq!((state.step, state.history.len()), (step, step));
            let shared = state.model.values.iter().chain(&state.outer.as_ref().unwrap().momentum);
            assert!(shared.into_iter().all(|&value| value == step as f32));
            assert!(state.adamw.mean.iter().chain(&state.adamw.square).all(|&value| value == state.adamw.mean[0]));
            let round = state.round.filter(|round| round.step == step).map(|round| round.contribution);
            (state.adamw.mean[0], state.adamw.updates, round)
        };
        states.into_iter().map(brief).collect()
    }

    #[test]
    fn newcomers_get_moments_and_sit_out_a_round_that_the_others_have_done() {
        let ranks = [local(8, true, 1.0), local(8, true, 2.0), local(0, false, 0.0), local(0, false, 0.0)];
        let own = |mark: f32| (mark, 12, Some(Some(vec![mark])));
        let expected = vec![own(1.0), own(2.0), (1.0, 12, Some(None)), (2.0, 12, Some(None))];
        assert_eq!(brief(align_all(ranks), 8), expected);
    }

    #[test]
    fn newcomers_take_local_steps_if_others_have_them_before_them() {
        let ranks = [local(8, true, 1.0), local(8, false, 2.0), local(0, false, 0.0)];
        assert_eq!(brief(align_all(ranks), 8), [(1.0, 12, Some(Some(vec![1.0]))), (2.0, 8, None), (2.0, 8, None)]);
    }

    #[test]
    fn a_rank_that_has_taken_the_outer_step_brings_it_to_the_others() {
        // Rank 1 even has the local steps of the next round; rank 3 is new.
        let ranks = [local(4, true, 1.0), local(8, true, 2.0), local(4, true, 3.0), local(0, false, 0.0)];
        let expected = [(1.0, 8, None), (2.0, 12, Some(Some(vec![2.0]))), (3.0, 8, None), (1.0, 8, None)];
        assert_eq!(brief(align_all(ranks), 8), expected);
    }

    #[test]
    fn at_the_begin_all_ranks_are_new() {
        let ranks = [local(0, true, 1.0), local(0, false, 0.0)];
        assert_eq!(brief(align_all(ranks), 0), [(1.0, 4, Some(Some(vec![1.0]))), (0.0, 0, None)]);
    }
}
