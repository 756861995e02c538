//! Operations that synchronise with other ranks, such as making a communicator.
//!
//! Operations of one communicator run in their order, operations of several communicators concurrently in separate
//! threads, because one thread of a program may hold several ranks.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::abi::Status;
use crate::abi::error::{Error, Result};
use crate::comm::communicator::Communicator;

/// An operation that synchronises with other ranks.
pub(crate) struct Job {
    /// The communicator whose operations must stay in order; it is not ready until this is done.
    pub(crate) comm: Arc<Communicator>,
    /// True if the caller waits for it.
    pub(crate) blocking: bool,
    pub(crate) run: Box<dyn FnOnce() -> Result<()> + Send>,
    /// Notifies the ranks that wait for it that it will not run, and why.
    pub(crate) refuse: Refuse,
}

/// Function of a [`Job`] that is called with the reason if the job does not run.
pub(crate) type Refuse = Box<dyn FnOnce(&Error) + Send>;

/// Jobs of one communicator, which run one after the other or, if that does not happen, are refused when it is dropped:
/// no communicator stays in progress, and no rank waits for one that does not run.
struct Queue {
    jobs: VecDeque<Job>,
    /// Reason for which the rest is refused; `None` for one whose thread ended.
    why: Option<Error>,
}

impl Queue {
    fn comm(&self) -> Option<&Arc<Communicator>> {
        self.jobs.front().map(|job| &job.comm)
    }

    /// Runs all of them; ends with the first failure.
    fn run(mut self) -> Result<()> {
        while let Some(job) = self.jobs.pop_front() {
            (job.run)().inspect_err(|error| self.why = Some(error.clone()))?;
        }
        Ok(())
    }

    /// Runs each of them; their failures are reported by the communicators.
    fn run_each(mut self) {
        while let Some(job) = self.jobs.pop_front() {
            if let Err(error) = (job.run)() {
                log::warn!("communicator {}: {}", job.comm.name(), error.text);
            }
        }
    }

    fn refuse(mut self, why: &Error) {
        self.why = Some(why.clone());
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let lost = || Error::internal("the operation was not done: its thread has ended");
        let why = self.why.take().unwrap_or_else(lost);
        self.jobs.drain(..).for_each(|job| (job.refuse)(&why));
    }
}

/// Runs one job: now if the caller waits for it, else in the background, with `ncclInProgress`.
pub(crate) fn run_one(job: Job) -> Result<Status> {
    if job.blocking {
        return (job.run)().map(|()| Status::Success);
    }
    in_background(Queue { jobs: [job].into(), why: None }).map(|()| Status::InProgress)
}

/// Refuses all of these jobs.
pub(crate) fn refuse(jobs: Vec<Job>, why: &Error) {
    Queue { jobs: jobs.into(), why: None }.refuse(why);
}

/// Runs jobs, those of one communicator in their order. `ncclInProgress` if the caller does not wait for one of them.
pub(crate) fn run(jobs: Vec<Job>) -> Result<Status> {
    let background = jobs.iter().any(|job| !job.blocking);
    let mut queues: Vec<Queue> = Vec::new();
    for job in jobs {
        let same = queues.iter_mut().find(|queue| queue.comm().is_some_and(|comm| Arc::ptr_eq(comm, &job.comm)));
        match same {
            Some(queue) => queue.jobs.push_back(job),
            None => queues.push(Queue { jobs: [job].into(), why: None }),
        }
    }
    if background {
        // Each of them, also if a thread is missing for another.
        let begun: Vec<Result<()>> = queues.into_iter().map(in_background).collect();
        return begun.into_iter().collect::<Result<()>>().map(|()| Status::InProgress);
    }
    let Some(own) = queues.pop() else { return Ok(Status::Success) };
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let spawn =
            |queue: Queue| std::thread::Builder::new().name(NAME.to_owned()).spawn_scoped(scope, move || queue.run());
        let threads: Vec<_> = queues.into_iter().map(spawn).collect();
        let own = own.run();
        let panicked = || Err(Error::internal("a thread of the group panicked"));
        let joined = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| panicked()),
            Err(e) => Err(not_spawned(&e)),
        });
        joined.chain([own]).collect()
    });
    outcomes.into_iter().collect::<Result<Vec<()>>>().map(|_| Status::Success)
}

/// Name of the threads that run jobs.
const NAME: &str = "tinynccl-nccl";

fn not_spawned(error: &std::io::Error) -> Error {
    tinynccl::Error::io("ncclGroupEnd", "starting a thread", error).into()
}

/// Runs jobs of one communicator in a separate thread; their errors are reported by the communicators.
fn in_background(queue: Queue) -> Result<()> {
    let pending: Vec<_> = queue.jobs.iter().map(|job| job.comm.begin_operation()).collect();
    let work = move || {
        queue.run_each();
        drop(pending);
    };
    std::thread::Builder::new().name(NAME.to_owned()).spawn(work).map(drop).map_err(|e| not_spawned(&e))
}
