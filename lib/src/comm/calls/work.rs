//! The handle of an asynchronous call.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::threads::{deadline_after, left, lock};

/// A collective in flight that owns its buffers `B` until it is complete.
///
/// Dropping it without waiting is fine: the call goes on, its buffers are freed at the end.
#[derive(Debug)]
#[must_use = "the result of the call is in the Work: wait for it"]
pub struct Work<B> {
    shared: Arc<Shared<B>>,
    origin: Origin,
    rank: usize,
}

#[derive(Debug)]
struct Shared<B> {
    outcome: Mutex<Option<Result<B>>>,
    done: Condvar,
}

/// Completes a [`Work`]: with an error if it is dropped before.
pub(super) struct Completer<B> {
    shared: Arc<Shared<B>>,
    rank: usize,
    told: bool,
}

impl<B> Completer<B> {
    pub(super) fn complete(mut self, outcome: Result<B>) {
        self.tell(outcome);
    }

    fn tell(&mut self, outcome: Result<B>) {
        self.told = true;
        *lock(&self.shared.outcome) = Some(outcome);
        self.shared.done.notify_all();
    }
}

impl<B> Drop for Completer<B> {
    fn drop(&mut self) {
        if !self.told {
            let reason = format!("rank {}: the call panicked, or was never begun", self.rank);
            self.tell(Err(Error::Aborted { op: "asynchronous call".to_owned(), rank: self.rank, reason }));
        }
    }
}

impl<B> Work<B> {
    /// A handle, and what completes it.
    pub(super) fn pair(origin: Origin, rank: usize) -> (Work<B>, Completer<B>) {
        let shared = Arc::new(Shared { outcome: Mutex::new(None), done: Condvar::new() });
        (Work { shared: shared.clone(), origin, rank }, Completer { shared, rank, told: false })
    }

    /// True when [`Work::wait`] would return at once.
    pub fn test(&self) -> bool {
        !self.origin.is_here() || lock(&self.shared.outcome).is_some()
    }

    /// Waits for the end and gives the buffers back. The wait is finite: the call fails at the communicator's deadline.
    /// In a forked child it is an error, because the call completes only in the process that made it.
    ///
    /// ```
    /// # use tinynccl::ReduceOp;
    /// # tinynccl::comm::on_threads(2, |comm| {
    /// // The buffer belongs to the call until it is done.
    /// let work = comm.all_reduce_async(vec![1.0f32; 1 << 16], ReduceOp::Sum)?;
    /// // … compute meanwhile …
    /// let sum = work.wait()?;
    /// assert_eq!(sum[0], 2.0);
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    pub fn wait(self) -> Result<B> {
        self.origin.check(|| "wait".to_owned(), self.rank)?;
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
        if let Err(error) = self.origin.check(|| "wait".to_owned(), self.rank) {
            return Ok(Err(error));
        }
        let end = deadline_after(timeout);
        let mut outcome = lock(&self.shared.outcome);
        loop {
            if let Some(result) = outcome.take() {
                return Ok(result);
            }
            let left = left(end);
            if left.is_zero() {
                break;
            }
            outcome = self.shared.done.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(outcome);
        Err(self)
    }
}
