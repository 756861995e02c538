//! `ncclGroupStart`, `ncclGroupEnd`: the operations that a thread submits together.
//!
//! Inside a group nothing happens: jobs and calls are kept until the outermost group ends. Then the jobs run, and after
//! them the calls are enqueued.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use tinynccl::comm::RawCall;

use super::jobs::{self, Job};
use super::launch::{self, Call, Stream, Work};
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::abi::{self, Status};
use crate::comm::communicator::Communicator;

/// Jobs and calls that a thread keeps until its outermost group ends.
struct Group {
    jobs: Vec<Job>,
    calls: Vec<Call>,
    /// The first failure inside the group.
    error: Option<Error>,
}

impl Group {
    const EMPTY: Group = Group { jobs: Vec::new(), calls: Vec::new(), error: None };
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
pub(crate) fn recorded<T>(outcome: Result<T>) -> Result<T> {
    outcome.inspect_err(|error| {
        if is_open() {
            GROUP.with_borrow_mut(|group| _ = group.error.get_or_insert_with(|| error.clone()));
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

/// Makes a [`call`] of a custom operation; `around` is the collective that it enqueues, if it does.
pub(crate) fn enqueue(
    comm: &Arc<Communicator>,
    stream: CUstream,
    around: Option<RawCall>,
    enqueue: impl FnOnce(&Arc<Communicator>, CUstream) -> Result<()> + Send + 'static,
) -> Result<()> {
    let work = Work::Own { around, enqueue: Box::new(enqueue) };
    call(Call { comm: comm.clone(), stream: Stream(stream), work })
}

/// Makes a [`call`] that waits for other ranks.
pub(crate) fn wait(
    comm: &Arc<Communicator>,
    stream: CUstream,
    enqueue: impl FnOnce(&Arc<Communicator>, CUstream) -> Result<()> + Send + 'static,
) -> Result<()> {
    call(Call { comm: comm.clone(), stream: Stream(stream), work: Work::Wait(Box::new(enqueue)) })
}

/// Submits a job of a communicator that is ready.
pub(crate) fn submit_on(
    comm: &Arc<Communicator>,
    run: impl FnOnce(&Arc<Communicator>) -> Result<()> + Send + 'static,
    refuse: impl FnOnce(&Error) + Send + 'static,
) -> Result<Status> {
    let own = comm.clone();
    let (comm, blocking) = (comm.clone(), comm.is_blocking());
    let kept = move || {
        run(&own).inspect_err(|error| {
            if !blocking {
                own.fail(error.clone())
            }
        })
    };
    submit(Job { comm, blocking, run: Box::new(kept), refuse: Box::new(refuse) })
}

/// Records a job whose arguments are wrong, inside a group: the ranks that wait for it are notified when the group
/// ends.
pub(crate) fn refuse_later(
    comm: &Arc<Communicator>,
    error: Error,
    refuse: impl FnOnce(&Error) + Send + 'static,
) -> Result<Status> {
    let (why, blocking) = (error.clone(), comm.is_blocking());
    let never = Job { comm: comm.clone(), blocking, run: Box::new(|| Err(why)), refuse: Box::new(refuse) };
    GROUP.with_borrow_mut(|group| group.jobs.push(never));
    Err(error)
}

/// Submits a job: runs it at once, or at the end of the group. `ncclInProgress` for one that the caller does not wait
/// for.
pub(crate) fn submit(job: Job) -> Result<Status> {
    if is_open() {
        GROUP.with_borrow_mut(|group| group.jobs.push(job));
        return Ok(Status::Success);
    }
    jobs::run_one(job)
}

fn start() {
    DEPTH.set(DEPTH.get() + 1);
}

/// Ends a group; what was kept, if it was the outermost one.
fn end() -> Result<Option<Group>> {
    let depth = DEPTH.get().checked_sub(1).ok_or_else(|| {
        Error::usage("there is no group to end: expected a call of ncclGroupStart before, in this thread")
    })?;
    DEPTH.set(depth);
    Ok((depth == 0).then(|| GROUP.replace(Group::EMPTY)))
}

/// Runs `work` in a separate group, so that its jobs run concurrently.
pub(crate) fn concurrently(work: impl FnOnce() -> Result<()>) -> Result<Status> {
    start();
    let outcome = work();
    let group = end()?;
    match (outcome, group) {
        (Err(error), group) => {
            group.into_iter().for_each(|group| jobs::refuse(group.jobs, &error));
            Err(error)
        }
        (Ok(()), None) => Ok(Status::Success),
        (Ok(()), Some(group)) => run(group),
    }
}

fn run(group: Group) -> Result<Status> {
    if let Some(error) = group.error {
        let (jobs, calls) = (group.jobs.len(), group.calls.len());
        let error =
            Error { text: format!("{} (nothing of the group's {} was done)", error.text, jobs + calls), ..error };
        jobs::refuse(group.jobs, &error);
        return Err(error);
    }
    let status = jobs::run(group.jobs)?;
    let mut calls = group.calls;
    launch::all(&mut calls)?;
    // The next group of this thread takes the memory of this one's list.
    GROUP.with_borrow_mut(|group| group.calls = calls);
    Ok(status)
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
            let simulated = Error::usage("ncclGroupSimulateEnd has ended its group, and does nothing of it");
            jobs::refuse(group.jobs, group.error.as_ref().unwrap_or(&simulated));
            if let Some(error) = group.error {
                return Err(error);
            }
        }
        if info.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's variable; size and magic are in every version.
        let info = unsafe { out("simInfo", info) }?;
        if info.magic != abi::SIM_INFO_MAGIC || info.size < size_of::<abi::SimInfo>() {
            return Err(Error::argument(format!(
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
    use crate::abi::config::Options;
    use std::sync::mpsc::channel;

    fn starting(blocking: bool) -> Arc<Communicator> {
        Arc::new(Communicator::starting(Options { blocking, name: None, blocks: None }, 0, Some((0, 2))))
    }

    /// A job that makes the communicator of `comm`.
    fn of(comm: &Arc<Communicator>, run: Box<dyn FnOnce() -> Result<()> + Send>) -> Job {
        let made = comm.clone();
        let refuse = Box::new(move |why: &Error| made.fail(why.clone()));
        Job { comm: comm.clone(), blocking: comm.is_blocking(), run, refuse }
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
        let one = starting(true);
        start();
        start();
        assert_eq!(submit(of(&one, log("first"))).unwrap(), Status::Success);
        assert_eq!(end_all().unwrap(), Status::Success);
        assert!(is_open() && receive.try_recv().is_err());
        submit(of(&one, log("second"))).unwrap();
        assert_eq!(end_all().unwrap(), Status::Success);
        assert!(!is_open());
        assert_eq!(receive.try_iter().collect::<Vec<_>>(), ["first", "second"]);
        let error = end_all().unwrap_err();
        assert_eq!(error.status, Status::InvalidUsage);
    }

    #[test]
    fn jobs_of_several_communicators_run_side_by_side() {
        // Each waits for the other: in one thread neither would end.
        let (to_one, one) = channel();
        let (to_two, two) = channel();
        start();
        let first = Box::new(move || {
            to_two.send(()).unwrap();
            one.recv().map_err(|_| Error::internal("lost"))
        });
        let second = Box::new(move || {
            to_one.send(()).unwrap();
            two.recv().map_err(|_| Error::internal("lost"))
        });
        submit(of(&starting(true), first)).unwrap();
        submit(of(&starting(true), second)).unwrap();
        assert_eq!(end_all().unwrap(), Status::Success);
    }

    #[test]
    fn an_error_inside_ends_the_group_with_it_and_nothing_is_done() {
        start();
        submit(of(&starting(true), Box::new(|| Err(Error::internal("it was done"))))).unwrap();
        let _ = recorded::<()>(Err(Error::argument("count is odd")));
        let _ = recorded::<()>(Err(Error::internal("later")));
        let error = end_all().unwrap_err();
        assert!(error.status == Status::InvalidArgument && error.text.contains("count is odd"), "{error:?}");
        assert!(!is_open());
    }

    #[test]
    fn a_communicator_that_is_not_made_is_not_in_progress() {
        let ok = || Box::new(|| Ok(())) as Box<dyn FnOnce() -> Result<()> + Send>;
        let failed = |comm: &Arc<Communicator>, word: &str| {
            let error = comm.async_error().unwrap_err();
            assert!(error.text.contains(word), "{error:?}");
        };
        // An error in its group, blocking or not.
        for blocking in [false, true] {
            let one = starting(blocking);
            start();
            submit(of(&one, ok())).unwrap();
            let _ = recorded::<()>(Err(Error::argument("count is odd")));
            end_all().unwrap_err();
            failed(&one, "count is odd");
        }
        // One before it in its queue that fails.
        let (first, second) = (starting(true), starting(true));
        start();
        submit(of(&first, Box::new(|| Err(Error::usage("rank 1 refuses"))))).unwrap();
        submit(Job { comm: first.clone(), ..of(&second, ok()) }).unwrap();
        end_all().unwrap_err();
        failed(&second, "rank 1 refuses");
        // A thread that panics.
        let (first, second) = (starting(false), starting(false));
        submit(of(&first, Box::new(|| panic!("on purpose")))).unwrap();
        start();
        submit(of(&first, Box::new(|| panic!("on purpose")))).unwrap();
        submit(Job { comm: first.clone(), ..of(&second, ok()) }).unwrap();
        assert_eq!(end_all().unwrap(), Status::InProgress);
        while second.async_error() == Ok(Status::InProgress) {
            std::thread::yield_now();
        }
        failed(&second, "its thread has ended");
    }

    #[test]
    fn jobs_that_nobody_waits_for_run_in_the_background() {
        let (send, receive) = channel::<()>();
        let one = starting(false);
        let run = Box::new(move || receive.recv().map_err(|_| Error::internal("lost")));
        assert_eq!(submit(of(&one, run)).unwrap(), Status::InProgress);
        assert_eq!(one.async_error().unwrap(), Status::InProgress);
        send.send(()).unwrap();
    }
}
