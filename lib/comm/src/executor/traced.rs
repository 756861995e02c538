//! Recorded runs: the executor describes its plans to the recorder.

use super::plan::{Instruction, PlanLane};
use super::{Links, Supervisor, Task, WaitPolicy, Workspace, run_with};
use crate::trace::{Call, StepDone};
use tinynccl_plan::error::Result;

/// [`super::run`] with a recorder, which must be there. A failure is written out at once.
///
/// # Safety
/// As [`super::run`].
#[cold]
pub(super) unsafe fn run(
    tasks: &[Task<'_>],
    links: &mut Links,
    workspace: &mut Workspace,
    supervisor: &dyn Supervisor,
    policy: &WaitPolicy,
) -> Result<()> {
    let Some(mut recorder) = workspace.recorder.take() else { return Ok(()) };
    // SAFETY: forwarded from the caller.
    let outcome = unsafe { run_with(tasks, links, workspace, supervisor, policy, &mut *recorder) };
    if outcome.is_err() {
        for (index, state) in workspace.lanes.iter().enumerate().filter(|(_, state)| !state.done) {
            let task = &tasks[state.task];
            if let Some((instruction, lane, window)) = state.at(task.plan) {
                recorder.unfinished(index, describe(instruction, task, window, bytes(task, lane, instruction, window)));
            }
        }
    }
    recorder.run_ends(tasks.iter().map(|task| (call(task), task.plan.lanes.len())));
    if let Err(error) = &outcome {
        recorder.flush(Some(&error.to_string()));
    }
    workspace.recorder = Some(recorder);
    outcome
}

fn bytes(task: &Task<'_>, lane: &PlanLane, instruction: &Instruction, window: usize) -> usize {
    match window < lane.windows {
        true => lane.partition.parts(window, instruction.parts.clone()).len() * task.plan.elem,
        false => 0,
    }
}

/// A step for the recorder.
#[inline]
pub(super) fn describe(instruction: &Instruction, task: &Task<'_>, window: usize, bytes: usize) -> StepDone {
    StepDone {
        kind: instruction.step.kind(),
        seq: task.header.seq,
        window,
        part: instruction.parts.start,
        bytes,
        recv: instruction.step.from(),
        send: instruction.step.to(),
    }
}

fn call(task: &Task<'_>) -> Call {
    let (header, plan) = (&task.header, task.plan);
    // The first window's parts are the longest.
    let steps =
        plan.lanes.iter().flat_map(|lane| plan.instructions[lane.instructions.clone()].iter().map(move |i| (lane, i)));
    let messages = steps.filter(|(_, i)| i.recv().or(i.send()).is_some());
    Call {
        count: header.count,
        seq: header.seq,
        root: header.root,
        windows: plan.lanes.iter().map(|lane| lane.windows).max().map_or(0, |n| u32::try_from(n).unwrap_or(u32::MAX)),
        message: messages.map(|(lane, i)| bytes(task, lane, i, 0)).max().unwrap_or(0) as u32,
        collective: header.collective,
        dtype: header.dtype,
        op: header.op,
        algorithm: header.algorithm,
    }
}
