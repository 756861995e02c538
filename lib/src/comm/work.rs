//! Asynchronous calls: a queue, one progress thread, and the handle a caller waits on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::state::lock;
use crate::error::{Error, Result};

/// A collective in flight that owns its buffers `B` until it is complete.
///
/// Dropping it without waiting is fine: the call goes on, its buffers are freed at the end.
#[derive(Debug)]
#[must_use = "the result of the call is in the Work: wait for it"]
pub struct Work<B> {
    shared: Arc<Shared<B>>,
}

#[derive(Debug)]
struct Shared<B> {
    outcome: Mutex<Option<Result<B>>>,
    done: Condvar,
}

impl<B> Work<B> {
    /// A handle, and the function that completes it.
    pub(super) fn pair() -> (Work<B>, impl FnOnce(Result<B>)) {
        let shared = Arc::new(Shared { outcome: Mutex::new(None), done: Condvar::new() });
        let completer = shared.clone();
        let complete = move |outcome| {
            *lock(&completer.outcome) = Some(outcome);
            completer.done.notify_all();
        };
        (Work { shared }, complete)
    }

    /// True when [`Work::wait`] would return at once.
    pub fn test(&self) -> bool {
        lock(&self.shared.outcome).is_some()
    }

    /// Waits for the end and gives the buffers back. Finite: the call itself fails at the communicator's deadline.
    pub fn wait(self) -> Result<B> {
        let mut outcome = lock(&self.shared.outcome);
        loop {
            match outcome.take() {
                Some(result) => return result,
                None => outcome = self.shared.done.wait(outcome).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits at most `timeout`; `Err(self)` when the call is still running.
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Result<B>, Work<B>> {
        let end = Instant::now() + timeout;
        let mut outcome = lock(&self.shared.outcome);
        loop {
            if let Some(result) = outcome.take() {
                return Ok(result);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            outcome = self.shared.done.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(outcome);
        Err(self)
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Calls waiting for the progress thread, in the order they were made.
#[derive(Default)]
pub(super) struct Queue {
    /// Waiting and running jobs. Changed under the lock; read without it by blocking calls.
    pending: AtomicUsize,
    jobs: Mutex<Jobs>,
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    thread: Option<std::thread::JoinHandle<()>>,
    closed: bool,
}

impl Queue {
    /// Appends a job; starts the progress thread with the first one.
    pub(super) fn push(self: &Arc<Self>, name: impl FnOnce() -> String, job: Job) -> Result<()> {
        let mut jobs = lock(&self.jobs);
        if jobs.closed {
            return Err(Error::invalid("asynchronous call", "the communicator is closed"));
        }
        if jobs.thread.is_none() {
            let queue = self.clone();
            let thread = std::thread::Builder::new()
                .name(name())
                .spawn(move || queue.serve())
                .map_err(|e| Error::io("asynchronous call", "starting the progress thread", &e))?;
            jobs.thread = Some(thread);
        }
        self.pending.fetch_add(1, Ordering::AcqRel);
        jobs.waiting.push_back(job);
        drop(jobs);
        self.changed.notify_all();
        Ok(())
    }

    fn serve(&self) {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                drop(jobs);
                job();
                jobs = lock(&self.jobs);
                self.pending.fetch_sub(1, Ordering::AcqRel);
                self.changed.notify_all();
            } else if jobs.closed {
                return;
            } else {
                jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// True when no job is waiting or running.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Waits until every job made so far is complete: a blocking call comes after them.
    pub(super) fn drain(&self) {
        if self.is_idle() {
            return;
        }
        let mut jobs = lock(&self.jobs);
        while self.pending.load(Ordering::Acquire) > 0 {
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Completes what is waiting and ends the thread.
    pub(super) fn close(&self) {
        let thread = {
            let mut jobs = lock(&self.jobs);
            jobs.closed = true;
            jobs.thread.take()
        };
        self.changed.notify_all();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic in a job has been reported by its own thread; there is nothing to add here.
            let _ = thread.join();
        }
    }
}
