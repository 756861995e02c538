//! Runs programs over links: the only place where a schedule meets bytes.
//!
//! A [`Task`] is one call: a [`Plan`] (the compiled program) with the caller's buffers. Lanes of all tasks advance
//! round robin, each as far as its links let it; when none can, the [`LinkWaiter`] spins, yields, then sleeps. If tasks
//! share a link, [`Order`] decides which uses it next.

mod lane;
mod links;
mod message;
mod operand;
mod order;
mod part;
mod peek;
mod plan;
mod traced;
mod verified;
mod wait;

pub(crate) use links::Links;
pub(crate) use message::one_message;
pub(crate) use peek::peek;
pub use plan::{Plan, Ranges};
pub use wait::{Supervisor, WaitPolicy, Waiter};

use crate::trace::{Off, Probe, Recorder};
use lane::LaneState;
use order::Order;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use wait::LinkWaiter;

/// The caller's memory. Raw, because in-place calls pass the same memory twice.
#[derive(Debug, Clone, Copy)]
pub struct Buffers {
    /// `Program` input: readable for all its segments.
    pub input: *const u8,
    /// `Program` output: writable for all its segments.
    pub output: *mut u8,
}

/// One call to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) buffers: Buffers,
    /// Header of every message of this call, but for its length.
    pub(crate) header: Header,
}

/// Working memory that is kept between calls.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    lanes: Vec<LaneState>,
    /// Lanes left per task.
    open: Vec<usize>,
    scratch: Vec<u64>,
    order: Order,
    /// Records every run, if there is one.
    pub(crate) recorder: Option<Box<Recorder>>,
}

impl Workspace {
    pub(crate) fn new(recorder: Option<Box<Recorder>>) -> Workspace {
        Workspace { recorder, ..Workspace::default() }
    }
}

/// Runs `tasks` together to their end, or to the first failure.
///
/// # Safety
/// For every task, `buffers.input` must be readable and `buffers.output` writable for all segments of the plan's
/// partition, and nothing else may access that memory until this returns. Input and output may overlap only as in the
/// collective's in-place form.
pub(crate) unsafe fn run(
    tasks: &[Task<'_>],
    links: &mut Links,
    workspace: &mut Workspace,
    supervisor: &dyn Supervisor,
    policy: &WaitPolicy,
) -> Result<()> {
    // SAFETY: forwarded from the caller.
    let outcome = unsafe {
        match workspace.recorder {
            None => run_with(tasks, links, workspace, supervisor, policy, &mut Off),
            Some(_) => traced::run(tasks, links, workspace, supervisor, policy),
        }
    };
    if outcome.is_err() {
        links.revoke();
    }
    outcome
}

/// [`run`], compiled once with hooks that record and once without hooks.
///
/// # Safety
/// As [`run`].
#[inline]
unsafe fn run_with(
    tasks: &[Task<'_>],
    links: &mut Links,
    workspace: &mut Workspace,
    supervisor: &dyn Supervisor,
    policy: &WaitPolicy,
    probe: &mut impl Probe,
) -> Result<()> {
    let Workspace { lanes, open, scratch, order, .. } = workspace;
    lanes.clear();
    open.clear();
    let mut words = 0;
    for (index, task) in tasks.iter().enumerate() {
        open.push(task.plan.lanes.len());
        lanes.extend((0..task.plan.lanes.len()).map(|lane| LaneState::new(index, lane, words)));
        words += task.plan.scratch_bytes.div_ceil(8);
    }
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    if let Some(audit) = &mut links.audit {
        // SAFETY: forwarded from the caller.
        unsafe { verified::begin(tasks, scratch, audit) };
    }
    let both = |directions: &dyn Fn(&Plan) -> bool| tasks.iter().any(|task| directions(task.plan));
    links.two_way = both(&|plan| plan.directions.0) && both(&|plan| plan.directions.1);
    if let Some(recorder) = probe.on() {
        recorder.run_begins(lanes.len());
    }
    // A task alone needs no order.
    let mut order = if tasks.len() > 1 {
        order.set(tasks, links.len());
        Some(order)
    } else {
        None
    };
    let mut live = lanes.len();
    // Lanes before this one are done, so a long group does not rescan its beginning.
    let mut first = 0;
    let mut waiter = LinkWaiter::new(supervisor, policy);
    while live > 0 {
        let mut moved = false;
        first += lanes[first..].iter().take_while(|lane| lane.done).count();
        for (lane, state) in lanes.iter_mut().enumerate().skip(first).filter(|(_, lane)| !lane.done) {
            let task = &tasks[state.task];
            if let Some(recorder) = probe.on() {
                recorder.enter(lane);
            }
            let (order, scratch) = (order.as_deref_mut(), scratch.as_mut_ptr());
            // SAFETY: forwarded from the caller; `scratch` holds this task's share from `state.scratch` on.
            let outcome = unsafe {
                match links.verifies(&task.header) {
                    true => lane::advance::<true>(state, task, links, order, scratch, probe),
                    false => lane::advance::<false>(state, task, links, order, scratch, probe),
                }
            };
            match outcome {
                Ok(progress) => {
                    moved |= progress;
                    if state.done {
                        live -= 1;
                        open[state.task] -= 1;
                    }
                }
                Err(lane::Stop::Error(error)) => return Err(supervisor.explain(&task.header, error)),
                Err(lane::Stop::Mismatch { peer, ours, theirs }) => {
                    return Err(supervisor.mismatch(peer, ours, theirs));
                }
            }
        }
        if live == 0 {
            break;
        }
        if moved {
            waiter.reset();
        } else {
            let blocked = Blocked { tasks, lanes, open, order: order.as_deref() };
            waiter.wait(links, &blocked)?;
            if let Some(recorder) = probe.on() {
                recorder.idles(waiter.phase(), || blocked.first());
            }
        }
    }
    while !links.flush().map_err(|e| supervisor.explain(&tasks[0].header, e))? {
        waiter.wait(links, &Blocked { tasks, lanes, open, order: order.as_deref() })?;
        if let Some(recorder) = probe.on() {
            recorder.idles(waiter.phase(), || None);
        }
    }
    if let Some(audit) = &links.audit {
        // SAFETY: forwarded from the caller.
        unsafe { verified::end(tasks, audit) }.map_err(|e| supervisor.explain(&tasks[0].header, e))?;
    }
    Ok(())
}

/// The links that blocked lanes wait for; only read on the slow path.
pub(crate) struct Blocked<'a> {
    tasks: &'a [Task<'a>],
    lanes: &'a [LaneState],
    open: &'a [usize],
    order: Option<&'a Order>,
}

impl Blocked<'_> {
    /// Calls `f` with the link index of every blocked lane: `(receiving, sending)`.
    fn links(&self, mut f: impl FnMut(Option<usize>, Option<usize>)) {
        for state in self.lanes.iter().filter(|s| !s.done) {
            let (recv, send) = state.waits_for(self.tasks[state.task].plan, self.order);
            f(recv, send);
        }
    }

    /// The first link that a lane waits for.
    fn first(&self) -> Option<usize> {
        let mut first = None;
        self.links(|recv, send| first = first.or(recv).or(send));
        first
    }

    /// Header of the first task that is not complete.
    fn header(&self) -> &Header {
        let index = self.open.iter().position(|&n| n > 0).unwrap_or(0);
        &self.tasks[index].header
    }
}

#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod zero_copy_tests;
