//! Handles of asynchronous calls.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::gpu::Enqueued;
use tinynccl_comm as comm;
use tinynccl_plan::error::Result;

/// A call in flight that owns its buffers `B` until it is complete. A thread waits for it with
/// [`Work::wait`], a task of any executor with `.await`.
///
/// Dropping it without waiting is fine: the call goes on, its buffers are freed at the end.
#[derive(Debug)]
#[must_use = "the result of the call is in the Work: wait for it"]
pub struct Work<B> {
    state: State<B>,
}

#[derive(Debug)]
enum State<B> {
    /// On the group's progress thread.
    Queued(comm::Work<B>),
    /// In a stream. Without buffers once they were given back.
    Enqueued(Arc<Enqueued>, Option<B>),
}

impl<B> From<comm::Work<B>> for Work<B> {
    fn from(work: comm::Work<B>) -> Work<B> {
        Work { state: State::Queued(work) }
    }
}

impl<B> Work<B> {
    pub(super) fn enqueued(call: Enqueued, buffers: B) -> Work<B> {
        Work { state: State::Enqueued(Arc::new(call), Some(buffers)) }
    }

    /// True when [`Work::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Queued(work) => work.is_done(),
            State::Enqueued(call, _) => call.is_over(),
        }
    }

    /// Waits for the end and gives the buffers back. Finite: the call fails at the group's deadline.
    pub fn wait(self) -> Result<B> {
        match self.state {
            State::Queued(work) => work.wait(),
            State::Enqueued(call, buffers) => call.wait().and_then(|()| call.give(buffers)),
        }
    }

    /// Waits at most `timeout`; `Err(self)` when the call is still running.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<B>, Work<B>> {
        match self.state {
            State::Queued(work) => work.wait_timeout(timeout).map_err(Work::from),
            State::Enqueued(call, buffers) => match call.wait_for(timeout) {
                Ok(true) => Ok(call.give(buffers)),
                Ok(false) => Err(Work { state: State::Enqueued(call, buffers) }),
                Err(error) => Ok(Err(error)),
            },
        }
    }
}

// The buffers are never pinned: they are given back by value.
impl<B> Unpin for Work<B> {}

/// Ends with [`Work::wait`]'s result. On device memory the deadline counts from the first poll.
impl<B> Future for Work<B> {
    type Output = Result<B>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        match &mut self.get_mut().state {
            State::Queued(work) => Pin::new(work).poll(context),
            State::Enqueued(call, buffers) => match call.poll(context.waker()) {
                Poll::Ready(outcome) => Poll::Ready(outcome.and_then(|()| call.give(buffers.take()))),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}
