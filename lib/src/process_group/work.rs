//! Handles of asynchronous calls.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, DriverError};

use super::awaited;
use super::backend::Backend;
use tinynccl_comm as comm;
use tinynccl_cuda::{Stream, cuda};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::backoff::Backoff;

/// Spinning does not speed up the device.
const BACKOFF: Backoff = Backoff { spin: Duration::from_micros(100), yields: Duration::from_micros(1900) };
/// Longest sleep before the event is queried again.
const LONGEST: Duration = Duration::from_micros(50);

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
            State::Enqueued(call, buffers) => match awaited::poll(call, context.waker()) {
                Poll::Ready(outcome) => Poll::Ready(outcome.and_then(|()| call.give(buffers.take()))),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

/// A call in a stream: an event after it.
pub(super) struct Enqueued {
    backend: Arc<dyn Backend>,
    mark: CudaEvent,
    op: &'static str,
    timeout: Duration,
    /// Time at which a task began to await it.
    awaited: OnceLock<Instant>,
}

impl Enqueued {
    /// Records an event in `stream`.
    pub(super) fn mark(
        backend: &Arc<dyn Backend>,
        stream: &Stream,
        op: &'static str,
        timeout: Duration,
    ) -> Result<Enqueued> {
        let failed = |e: DriverError| cuda(op, "marking the call's end in the stream", e);
        let context = backend.device().ok_or_else(|| Error::invalid(op, "the group has no GPU"))?;
        context.bind_to_thread().map_err(failed)?;
        let mark = context.new_event(None).map_err(failed)?;
        // SAFETY: the event is ours; the stream is of this device, by the contract of the buffer that came with it.
        unsafe { cudarc::driver::result::event::record(mark.cu_event(), stream.handle()) }.map_err(failed)?;
        Ok(Enqueued { backend: backend.clone(), mark, op, timeout, awaited: OnceLock::new() })
    }

    /// True once the stream has passed the event, or never will.
    pub(super) fn is_over(&self) -> bool {
        !matches!(self.mark.try_is_complete(), Ok(false)) || self.backend.check().is_err()
    }

    /// True when the group's deadline has passed since the first call of this.
    pub(super) fn is_late(&self) -> bool {
        self.awaited.get_or_init(Instant::now).elapsed() >= self.timeout
    }

    /// Gives the buffers back, once.
    fn give<B>(&self, buffers: Option<B>) -> Result<B> {
        buffers.ok_or_else(|| Error::invalid(self.op, "the call's buffers were given back before"))
    }

    /// Waits until the stream has passed the event, or the group's deadline.
    pub(super) fn wait(&self) -> Result<()> {
        self.wait_within(self.timeout)
    }

    /// Fails where the stream has not passed the event after `timeout`.
    pub(super) fn wait_within(&self, timeout: Duration) -> Result<()> {
        match self.wait_for(timeout)? {
            true => Ok(()),
            false => Err(self.backend.overdue(self.op, self.timeout)),
        }
    }

    /// False when the stream has not passed the event after `timeout`.
    fn wait_for(&self, timeout: Duration) -> Result<bool> {
        let start = Instant::now();
        let mut turns = 0u32;
        loop {
            if self.mark.try_is_complete().map_err(|e| cuda(self.op, "waiting for the stream", e))? {
                // A kernel that gave up has also ended.
                return self.backend.check().map(|()| true);
            }
            turns += 1;
            if turns.is_multiple_of(16) {
                self.backend.check()?;
                let waited = start.elapsed();
                if waited >= timeout {
                    return Ok(false);
                }
                BACKOFF.nap(waited, LONGEST);
            }
        }
    }
}

impl fmt::Debug for Enqueued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in a stream of {:?}", self.op, self.backend)
    }
}
