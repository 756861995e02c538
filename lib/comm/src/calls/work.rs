//! The handle of an asynchronous call.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::{deadline_after, left, lock};

/// A collective in flight that owns its buffers `B` until it is complete. A thread waits for it with
/// [`Work::wait`], a task of any executor with `.await`.
///
/// Dropping it without waiting is fine: the call goes on, its buffers are freed at the end.
///
/// ```
/// # extern crate tinynccl_comm as tinynccl;
/// # use tinynccl::{Comm, ReduceOp, Result};
/// async fn average(comm: &Comm, gradients: Vec<f32>) -> Result<Vec<f32>> {
///     comm.all_reduce_in_place_async(gradients, ReduceOp::Avg)?.await
/// }
/// ```
#[derive(Debug)]
#[must_use = "the result of the call is in the Work: wait for it"]
pub struct Work<B> {
    shared: Arc<Shared<B>>,
    origin: Origin,
    rank: usize,
}

#[derive(Debug)]
struct Shared<B> {
    state: Mutex<State<B>>,
    done: Condvar,
}

#[derive(Debug)]
enum State<B> {
    /// The call runs. The task that awaits it, if one does, is woken at its end.
    Running(Option<Waker>),
    Done(Result<B>),
    /// The outcome was given to a waiter.
    Taken,
}

impl<B> State<B> {
    /// The outcome, once there is one; to the first caller alone.
    fn take(&mut self) -> Option<Result<B>> {
        match std::mem::replace(self, State::Taken) {
            State::Done(outcome) => Some(outcome),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// Completes a [`Work`]: with an error if it is dropped before.
pub(super) struct Completer<B> {
    shared: Arc<Shared<B>>,
    rank: usize,
    completed: bool,
}

impl<B> Completer<B> {
    pub(super) fn complete(mut self, outcome: Result<B>) {
        self.set(outcome);
    }

    fn set(&mut self, outcome: Result<B>) {
        self.completed = true;
        let before = std::mem::replace(&mut *lock(&self.shared.state), State::Done(outcome));
        self.shared.done.notify_all();
        if let State::Running(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<B> Drop for Completer<B> {
    fn drop(&mut self) {
        if !self.completed {
            let reason = format!("rank {}: the call panicked, or was never begun", self.rank);
            self.set(Err(Error::Aborted { op: "asynchronous call".to_owned(), rank: self.rank, reason }));
        }
    }
}

impl<B> Work<B> {
    /// A handle, and what completes it.
    pub(super) fn pair(origin: Origin, rank: usize) -> (Work<B>, Completer<B>) {
        let shared = Arc::new(Shared { state: Mutex::new(State::Running(None)), done: Condvar::new() });
        (Work { shared: shared.clone(), origin, rank }, Completer { shared, rank, completed: false })
    }

    /// True when [`Work::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        !self.origin.is_here() || matches!(*lock(&self.shared.state), State::Done(_))
    }

    /// Waits for the end and gives the buffers back. The wait is finite: the call fails at the communicator's deadline.
    /// In a forked child it is an error, because the call completes only in the process that made it.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # use tinynccl::ReduceOp;
    /// # tinynccl::comm::on_threads(2, |comm| {
    /// // The buffer belongs to the call until it is done.
    /// let work = comm.all_reduce_in_place_async(vec![1.0f32; 1 << 16], ReduceOp::Sum)?;
    /// // … compute meanwhile …
    /// let sum = work.wait()?;
    /// assert_eq!(sum[0], 2.0);
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    pub fn wait(self) -> Result<B> {
        self.origin.check(|| "wait".to_owned(), self.rank)?;
        let mut state = lock(&self.shared.state);
        loop {
            match state.take() {
                Some(outcome) => return outcome,
                None => state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits at most `timeout`; `Err(self)` when the call is still running.
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Result<B>, Work<B>> {
        if let Err(error) = self.origin.check(|| "wait".to_owned(), self.rank) {
            return Ok(Err(error));
        }
        let end = deadline_after(timeout);
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(outcome) = state.take() {
                return Ok(outcome);
            }
            let left = left(end);
            if left.is_zero() {
                break;
            }
            state = self.shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        Err(self)
    }
}

/// Ends with [`Work::wait`]'s result, at the communicator's deadline at the latest. After its end it never ends again.
impl<B> Future for Work<B> {
    type Output = Result<B>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        if let Err(error) = self.origin.check(|| "await".to_owned(), self.rank) {
            return Poll::Ready(Err(error));
        }
        let mut state = lock(&self.shared.state);
        if let State::Running(waker) = &mut *state {
            match waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
        }
        state.take().map_or(Poll::Pending, Poll::Ready)
    }
}
