//! One lane: an instruction pointer over (window, instruction).

use super::Task;
use super::links::Links;
use super::order::Order;
use super::part::Part;
use super::plan::{Instruction, Plan, PlanLane};
use super::traced;
use crate::trace::Probe;
use tinynccl_plan::error::Error;
use tinynccl_plan::wire::Header;
use tinynccl_transport::ZeroCopy;

/// Position of a lane in its program.
#[derive(Debug)]
pub(super) struct LaneState {
    pub(super) task: usize,
    lane: usize,
    window: usize,
    pc: usize,
    stage: Stage,
    pub(super) done: bool,
    /// First word of the task's scratch memory.
    scratch: usize,
}

/// State of the current instruction: it waits for one of its two links, never for both. Waiting on a link that is ready
/// would end every sleep at once.
#[derive(Debug, Default)]
pub(super) struct Stage {
    /// The receiving half is complete, the sending half is not.
    pub(super) received: bool,
    /// The message is here, but there is no slot for the result.
    pub(super) needs_slot: bool,
    /// The data that the instruction overwrites is still being sent.
    overwrites: bool,
    /// The instruction is complete, but for the exchange of sums.
    performed: bool,
    /// Our sums have been sent.
    pub(super) told: bool,
}

/// Why a lane cannot go on at all.
#[derive(Debug)]
pub(super) enum Stop {
    Error(Error),
    /// The peer of this link sent a message that this call does not expect.
    Mismatch {
        peer: usize,
        ours: Header,
        theirs: Header,
    },
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Error(error)
    }
}

impl LaneState {
    pub(super) fn new(task: usize, lane: usize, scratch: usize) -> Self {
        LaneState { task, lane, window: 0, pc: 0, stage: Stage::default(), done: false, scratch }
    }

    /// The current instruction, its lane and window; `None` at the end of a window.
    pub(super) fn at<'p>(&self, plan: &'p Plan) -> Option<(&'p Instruction, &'p PlanLane, usize)> {
        let lane = plan.lanes.get(self.lane)?;
        let instruction = plan.instructions.get(lane.instructions.clone())?.get(self.pc)?;
        Some((instruction, lane, self.window))
    }

    /// The link that blocks the current instruction: `(receiving, sending)`.
    ///
    /// Neither, while another call holds one of them: that call waits for it.
    pub(super) fn waits_for(&self, plan: &Plan, order: Option<&Order>) -> (Option<usize>, Option<usize>) {
        match plan.instructions[plan.lanes[self.lane].instructions.clone()].get(self.pc) {
            None => (None, None),
            Some(i) if order.is_some_and(|order| !order.is_turn_of(self.task, i)) => (None, None),
            Some(i) if self.stage.performed => match i.send().filter(|_| i.last_send && !self.stage.told) {
                None => (i.recv(), None),
                send => (None, send),
            },
            Some(i) if self.stage.overwrites => (None, i.awaits.map(|link| link as usize)),
            Some(i) if i.recv().is_none() || self.stage.received || self.stage.needs_slot => (None, i.send()),
            Some(i) => (i.recv(), None),
        }
    }
}

/// Runs instructions until one has to wait or the lane ends; `true` when at least one made progress. `VERIFIED`: the
/// call is verified.
///
/// # Safety
/// As [`super::run`]; `scratch` must hold the task's scratch memory from word `state.scratch` on.
pub(super) unsafe fn advance<const VERIFIED: bool>(
    state: &mut LaneState,
    task: &Task<'_>,
    links: &mut Links,
    mut order: Option<&mut Order>,
    scratch: *mut u64,
    probe: &mut impl Probe,
) -> Result<bool, Stop> {
    let plan = task.plan;
    let lane = &plan.lanes[state.lane];
    let program = &plan.instructions[lane.instructions.clone()];
    let header = Header { count: lane.count.unwrap_or(task.header.count), ..task.header };
    let mut moved = false;
    while state.window < lane.windows {
        while let Some(instruction) = program.get(state.pc) {
            if order.as_ref().is_some_and(|order| !order.is_turn_of(state.task, instruction)) {
                return Ok(moved);
            }
            let range = lane.partition.parts(state.window, instruction.parts.clone());
            let part = Part::<VERIFIED> {
                plan,
                instruction,
                partition: &lane.partition,
                window: state.window,
                header: Header { len: (range.len() * plan.elem) as u32, ..header },
                buffers: task.buffers,
                // SAFETY: the workspace was grown to hold every task's share.
                scratch: unsafe { scratch.add(state.scratch) }.cast(),
                start_in_scratch: match plan.scratch_bytes {
                    0 => 0,
                    _ => lane.partition.scratch_start(instruction.parts.start).saturating_sub(plan.scratch_first),
                },
                start: range.start,
                len: range.len(),
            };
            // Never for the last message: none would follow.
            if instruction.followed
                && (state.pc + 1 < program.len() || state.window + 1 < lane.windows)
                && let Some(link) = instruction.send()
            {
                links.sends[link].expect_more();
            }
            if plan.zero_copy
                && let Some(link) = instruction.awaits
            {
                let link = &mut links.sends[link as usize];
                let a_device_reads = |link: &mut dyn ZeroCopy| !link.receiver_pulls();
                state.stage.overwrites = !link.is_flushed() && link.zero_copy().is_some_and(a_device_reads) && {
                    link.progress()?;
                    !link.is_flushed()
                };
                if state.stage.overwrites {
                    return Ok(moved);
                }
            }
            // SAFETY: forwarded from the caller.
            let mut performed = VERIFIED && state.stage.performed || unsafe { part.perform(&mut state.stage, links) }?;
            if VERIFIED && performed && state.window + 1 == lane.windows {
                state.stage.performed = true;
                performed = part.exchange_sums(&mut state.stage, links)?;
            }
            if !performed {
                if let Some(recorder) = probe.on() {
                    let (recv, send) = state.waits_for(plan, order.as_deref());
                    recorder.blocked(recv, send);
                }
                return Ok(moved);
            }
            if let Some(recorder) = probe.on() {
                recorder.step(traced::describe(instruction, task, state.window, part.bytes()));
            }
            moved = true;
            if let Some(order) = &mut order
                && state.window + 1 == lane.windows
            {
                order.pass_on(instruction);
            }
            state.stage = Stage::default();
            state.pc += 1;
        }
        state.pc = 0;
        state.window += 1;
    }
    state.done = true;
    Ok(true)
}
