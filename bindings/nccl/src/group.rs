//! `ncclGroupStart`, `ncclGroupEnd`: the operations that a thread submits together.
//!
//! Inside a group nothing happens: *jobs* (operations that synchronise with other ranks, such as making a communicator)
//! and *calls* are kept until the outermost group ends. Then the jobs run, each in a separate thread but those of one
//! communicator in their order, because one thread may hold several ranks; after them the calls are enqueued.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use tinynccl::comm::RawCall;

use crate::abi::{self, Status};
use crate::export::{export, out};
use crate::fault::{Fault, Result};
use crate::launch::{self, Call, Stream, Work};
use crate::member::Member;

/// An operation that synchronises with other ranks.
pub(crate) struct Job {
    /// The communicator whose operations must stay in order; it is not ready until this is done.
    pub(crate) member: Arc<Member>,
    /// True if the caller waits for it.
    pub(crate) blocking: bool,
    pub(crate) run: Box<dyn FnOnce() -> Result<()> + Send>,
    /// Notifies the ranks that wait for it that it will not run, and why.
    pub(crate) refuse: Refuse,
}

/// Function of a [`Job`] that is called with the reason if the job does not run.
pub(crate) type Refuse = Box<dyn FnOnce(&Fault) + Send>;

/// Jobs of one communicator, which run one after the other or, if that does not happen, are refused when it is dropped:
/// no communicator stays in progress, and no rank waits for one that does not come.
struct Lane {
    jobs: VecDeque<Job>,
    /// Reason for which the rest is refused; `None` for one whose thread ended.
    why: Option<Fault>,
}

impl Lane {
    fn member(&self) -> Option<&Arc<Member>> {
        self.jobs.front().map(|job| &job.member)
    }

    /// Does all of it; ends with the first failure.
    fn run(mut self) -> Result<()> {
        while let Some(job) = self.jobs.pop_front() {
            (job.run)().inspect_err(|fault| self.why = Some(fault.clone()))?;
        }
        Ok(())
    }

    /// Does each of them; their failures are the communicators'.
    fn run_each(mut self) {
        while let Some(job) = self.jobs.pop_front() {
            if let Err(fault) = (job.run)() {
                log::warn!("communicator {}: {}", job.member.name(), fault.text);
            }
        }
    }

    fn refuse(mut self, why: &Fault) {
        self.why = Some(why.clone());
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let lost = || Fault::internal("the operation was not done: its thread has ended");
        let why = self.why.take().unwrap_or_else(lost);
        self.jobs.drain(..).for_each(|job| (job.refuse)(&why));
    }
}

/// Jobs and calls that a thread keeps until its outermost group ends.
struct Group {
    jobs: Vec<Job>,
    calls: Vec<Call>,
    /// The first failure inside the group.
    fault: Option<Fault>,
}

impl Group {
    const EMPTY: Group = Group { jobs: Vec::new(), calls: Vec::new(), fault: None };
}

thread_local! {
    /// Number of groups that this thread has open.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static GROUP: RefCell<Group> = const { RefCell::new(Group::EMPTY) };
}

/// Returns true if this thread has a group open.
#[inline]
pub(crate) fn is_open() -> bool {
    DEPTH.get() > 0
}

/// Passes on the result of a function that can be in a group: an error inside a group also ends the group with it.
#[inline]
pub(crate) fn noted<T>(outcome: Result<T>) -> Result<T> {
    outcome.inspect_err(|fault| {
        if is_open() {
            GROUP.with_borrow_mut(|group| _ = group.fault.get_or_insert_with(|| fault.clone()));
        }
    })
}

/// Makes a call: at once, or at the end of the group.
pub(crate) fn call(call: Call) -> Result<()> {
    if !is_open() {
        return launch::one(call);
    }
    GROUP.with_borrow_mut(|group| group.calls.push(call));
    Ok(())
}

/// [`call`] for a custom operation; `around` is the collective that it enqueues, if it does.
pub(crate) fn enqueue(
    member: &Arc<Member>,
    stream: CUstream,
    around: Option<RawCall>,
    enqueue: impl FnOnce(&Arc<Member>, CUstream) -> Result<()> + Send + 'static,
) -> Result<()> {
    let work = Work::Own { around, enqueue: Box::new(enqueue) };
    call(Call { member: member.clone(), stream: Stream(stream), work })
}

/// [`call`] for a wait for other ranks.
pub(crate) fn wait(
    member: &Arc<Member>,
    stream: CUstream,
    enqueue: impl FnOnce(&Arc<Member>, CUstream) -> Result<()> + Send + 'static,
) -> Result<()> {
    call(Call { member: member.clone(), stream: Stream(stream), work: Work::Wait(Box::new(enqueue)) })
}

/// [`job`] of a communicator that is ready.
pub(crate) fn meet(
    member: &Arc<Member>,
    run: impl FnOnce(&Arc<Member>) -> Result<()> + Send + 'static,
    refuse: impl FnOnce(&Fault) + Send + 'static,
) -> Result<Status> {
    let own = member.clone();
    let (member, blocking) = (member.clone(), member.is_blocking());
    let kept = move || {
        run(&own).inspect_err(|fault| {
            if !blocking {
                own.fail(fault.clone())
            }
        })
    };
    job(Job { member, blocking, run: Box::new(kept), refuse: Box::new(refuse) })
}

/// Records a job whose arguments are wrong, inside a group: the ranks that wait for it are notified when the group
/// ends.
pub(crate) fn refuse_later(
    member: &Arc<Member>,
    fault: Fault,
    refuse: impl FnOnce(&Fault) + Send + 'static,
) -> Result<Status> {
    let (why, blocking) = (fault.clone(), member.is_blocking());
    let never = Job { member: member.clone(), blocking, run: Box::new(|| Err(why)), refuse: Box::new(refuse) };
    GROUP.with_borrow_mut(|group| group.jobs.push(never));
    Err(fault)
}

/// Does a job: at once, or at the end of the group. `ncclInProgress` for one that the caller does not wait for.
pub(crate) fn job(job: Job) -> Result<Status> {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.jobs.push(job));
        return Ok(Status::Success);
    }
    if job.blocking {
        return (job.run)().map(|()| Status::Success);
    }
    in_background(Lane { jobs: [job].into(), why: None }).map(|()| Status::InProgress)
}

fn start() {
    DEPTH.set(DEPTH.get() + 1);
}

/// Ends a group; what was kept, if it was the outermost one.
fn end() -> Result<Option<Group>> {
    let depth = DEPTH.get().checked_sub(1).ok_or_else(|| {
        Fault::usage("there is no group to end: expected a call of ncclGroupStart before, in this thread")
    })?;
    DEPTH.set(depth);
    Ok((depth == 0).then(|| GROUP.replace(Group::EMPTY)))
}

/// Runs `work` in a separate group, so that its jobs run concurrently.
pub(crate) fn together(work: impl FnOnce() -> Result<()>) -> Result<Status> {
    start();
    let outcome = work();
    let group = end()?;
    match (outcome, group) {
        (Err(fault), group) => {
            group.into_iter().for_each(|group| refuse(group.jobs, &fault));
            Err(fault)
        }
        (Ok(()), None) => Ok(Status::Success),
        (Ok(()), Some(group)) => run(group),
    }
}

fn run(group: Group) -> Result<Status> {
    if let Some(fault) = group.fault {
        let (jobs, calls) = (group.jobs.len(), group.calls.len());
        let fault =
            Fault { text: format!("{} (nothing of the group's {} was done)", fault.text, jobs + calls), ..fault };
        refuse(group.jobs, &fault);
        return Err(fault);
    }
    let status = jobs(group.jobs)?;
    let mut calls = group.calls;
    launch::all(&mut calls)?;
    // The next group of this thread takes the memory of this one's list.
    GROUP.with_borrow_mut(|group| group.calls = calls);
    Ok(status)
}

/// Refuses all of these jobs.
fn refuse(jobs: Vec<Job>, why: &Fault) {
    Lane { jobs: jobs.into(), why: None }.refuse(why);
}

fn jobs(jobs: Vec<Job>) -> Result<Status> {
    let background = jobs.iter().any(|job| !job.blocking);
    let mut lanes: Vec<Lane> = Vec::new();
    for job in jobs {
        let same = lanes.iter_mut().find(|lane| lane.member().is_some_and(|member| Arc::ptr_eq(member, &job.member)));
        match same {
            Some(lane) => lane.jobs.push_back(job),
            None => lanes.push(Lane { jobs: [job].into(), why: None }),
        }
    }
    if background {
        // Each of them, also if a thread is missing for another.
        let begun: Vec<Result<()>> = lanes.into_iter().map(in_background).collect();
        return begun.into_iter().collect::<Result<()>>().map(|()| Status::InProgress);
    }
    let Some(own) = lanes.pop() else { return Ok(Status::Success) };
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let spawn =
            |lane: Lane| std::thread::Builder::new().name(NAME.to_owned()).spawn_scoped(scope, move || lane.run());
        let threads: Vec<_> = lanes.into_iter().map(spawn).collect();
        let own = own.run();
        let panicked = || Err(Fault::internal("a thread of the group panicked"));
        let joined = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| panicked()),
            Err(e) => Err(not_spawned(&e)),
        });
        joined.chain([own]).collect()
    });
    outcomes.into_iter().collect::<Result<Vec<()>>>().map(|_| Status::Success)
}

const NAME: &str = "tinynccl-nccl";

fn not_spawned(error: &std::io::Error) -> Fault {
    tinynccl::Error::io("ncclGroupEnd", "starting a thread", error).into()
}

/// Runs jobs of one communicator in a separate thread; their errors are reported by the communicators.
fn in_background(lane: Lane) -> Result<()> {
    let under_way: Vec<_> = lane.jobs.iter().map(|job| job.member.begin()).collect();
    let work = move || {
        lane.run_each();
        drop(under_way);
    };
    std::thread::Builder::new().name(NAME.to_owned()).spawn(work).map(drop).map_err(|e| not_spawned(&e))
}

export! {
    /// Begins a group: until the matching `ncclGroupEnd`, calls of this thread are kept. Groups nest.
    fn ncclGroupStart / pncclGroupStart [] () {
        start();
        Ok(())
    }

    /// Ends a group. The outermost one runs what was kept; it fails with the first error inside, and then nothing runs.
    /// `ncclInProgress` if a communicator of the group is non-blocking and not done.
    fn ncclGroupEnd / pncclGroupEnd [] () {
        end()?.map_or(Ok(Status::Success), run)
    }

    /// Ends a group and does nothing of it. The estimated time is -1: unknown.
    fn ncclGroupSimulateEnd / pncclGroupSimulateEnd [] (info: *mut abi::SimInfo) {
        if let Some(group) = end()? {
            let simulated = Fault::usage("ncclGroupSimulateEnd has ended its group, and does nothing of it");
            refuse(group.jobs, group.fault.as_ref().unwrap_or(&simulated));
            if let Some(fault) = group.fault {
                return Err(fault);
            }
        }
        if info.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's variable; size and magic are in every version.
        let info = unsafe { out("simInfo", info) }?;
        if info.magic != abi::SIM_INFO_MAGIC || info.size < size_of::<abi::SimInfo>() {
            return Err(Fault::argument(format!(
                "simInfo has magic {:#x} and {} bytes: initialise it with NCCL_SIM_INFO_INITIALIZER",
                info.magic, info.size
            )));
        }
        info.estimated_time = -1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Options;
    use std::sync::mpsc::channel;

    fn member(blocking: bool) -> Arc<Member> {
        Arc::new(Member::starting(Options { blocking, name: None, blocks: None }, 0, Some((0, 2))))
    }

    /// A job that makes the communicator of `member`.
    fn of(member: &Arc<Member>, run: Box<dyn FnOnce() -> Result<()> + Send>) -> Job {
        let made = member.clone();
        let refuse = Box::new(move |why: &Fault| made.fail(why.clone()));
        Job { member: member.clone(), blocking: member.is_blocking(), run, refuse }
    }

    fn end_all() -> Result<Status> {
        end()?.map_or(Ok(Status::Success), run)
    }

    #[test]
    fn nothing_happens_before_the_outermost_group_ends() {
        let (send, receive) = channel();
        let log = |text: &'static str| {
            let send = send.clone();
            Box::new(move || {
                send.send(text).unwrap();
                Ok(())
            })
        };
        let one = member(true);
        start();
        start();
        assert_eq!(job(of(&one, log("first"))).unwrap(), Status::Success);
        assert_eq!(end_all().unwrap(), Status::Success);
        assert!(is_open() && receive.try_recv().is_err());
        job(of(&one, log("second"))).unwrap();
        assert_eq!(end_all().unwrap(), Status::Success);
        assert!(!is_open());
        assert_eq!(receive.try_iter().collect::<Vec<_>>(), ["first", "second"]);
        let fault = end_all().unwrap_err();
        assert_eq!(fault.status, Status::InvalidUsage);
    }

    #[test]
    fn jobs_of_several_communicators_run_side_by_side() {
        // Each waits for the other: in one thread neither would end.
        let (to_one, one) = channel();
        let (to_two, two) = channel();
        start();
        let first = Box::new(move || {
            to_two.send(()).unwrap();
            one.recv().map_err(|_| Fault::internal("lost"))
        });
        let second = Box::new(move || {
            to_one.send(()).unwrap();
            two.recv().map_err(|_| Fault::internal("lost"))
        });
        job(of(&member(true), first)).unwrap();
        job(of(&member(true), second)).unwrap();
        assert_eq!(end_all().unwrap(), Status::Success);
    }

    #[test]
    fn a_fault_inside_ends_the_group_with_it_and_nothing_is_done() {
        start();
        job(of(&member(true), Box::new(|| Err(Fault::internal("it was done"))))).unwrap();
        let _ = noted::<()>(Err(Fault::argument("count is odd")));
        let _ = noted::<()>(Err(Fault::internal("later")));
        let fault = end_all().unwrap_err();
        assert!(fault.status == Status::InvalidArgument && fault.text.contains("count is odd"), "{fault:?}");
        assert!(!is_open());
    }

    #[test]
    fn a_communicator_that_is_not_made_is_not_in_progress() {
        let ok = || Box::new(|| Ok(())) as Box<dyn FnOnce() -> Result<()> + Send>;
        let failed = |member: &Arc<Member>, word: &str| {
            let fault = member.async_error().unwrap_err();
            assert!(fault.text.contains(word), "{fault:?}");
        };
        // An error in its group, blocking or not.
        for blocking in [false, true] {
            let one = member(blocking);
            start();
            job(of(&one, ok())).unwrap();
            let _ = noted::<()>(Err(Fault::argument("count is odd")));
            end_all().unwrap_err();
            failed(&one, "count is odd");
        }
        // One before it in its lane that fails.
        let (first, second) = (member(true), member(true));
        start();
        job(of(&first, Box::new(|| Err(Fault::usage("rank 1 refuses"))))).unwrap();
        job(Job { member: first.clone(), ..of(&second, ok()) }).unwrap();
        end_all().unwrap_err();
        failed(&second, "rank 1 refuses");
        // A thread that panics.
        let (first, second) = (member(false), member(false));
        job(of(&first, Box::new(|| panic!("on purpose")))).unwrap();
        start();
        job(of(&first, Box::new(|| panic!("on purpose")))).unwrap();
        job(Job { member: first.clone(), ..of(&second, ok()) }).unwrap();
        assert_eq!(end_all().unwrap(), Status::InProgress);
        while second.async_error() == Ok(Status::InProgress) {
            std::thread::yield_now();
        }
        failed(&second, "its thread has ended");
    }

    #[test]
    fn jobs_that_nobody_waits_for_run_in_the_background() {
        let (send, receive) = channel::<()>();
        let one = member(false);
        let run = Box::new(move || receive.recv().map_err(|_| Fault::internal("lost")));
        assert_eq!(job(of(&one, run)).unwrap(), Status::InProgress);
        assert_eq!(one.async_error().unwrap(), Status::InProgress);
        send.send(()).unwrap();
    }
}
