//! Calls on device memory, until their stream has passed them.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, DriverError};

use super::awaited;
use crate::process_group::Backend;
use tinynccl_cuda::{Stream, cuda};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::backoff::Backoff;

/// Spinning does not speed up the device.
const BACKOFF: Backoff = Backoff { spin: Duration::from_micros(100), yields: Duration::from_micros(1900) };
/// Longest sleep before the event is queried again.
const LONGEST: Duration = Duration::from_micros(50);

/// A call in a stream: an event after it.
pub(in crate::process_group) struct Enqueued {
    backend: Arc<dyn Backend>,
    mark: CudaEvent,
    op: &'static str,
    timeout: Duration,
    /// Time at which a task began to await it.
    awaited: OnceLock<Instant>,
}

impl Enqueued {
    /// Records an event in `stream`.
    pub(in crate::process_group) fn mark(
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
    pub(in crate::process_group) fn is_over(&self) -> bool {
        !matches!(self.mark.try_is_complete(), Ok(false)) || self.backend.check().is_err()
    }

    /// True when the group's deadline has passed since the first call of this.
    pub(super) fn is_late(&self) -> bool {
        self.awaited.get_or_init(Instant::now).elapsed() >= self.timeout
    }

    /// Wakes `waker` once the call is over or its deadline has passed.
    pub(in crate::process_group) fn poll(self: &Arc<Self>, waker: &Waker) -> Poll<Result<()>> {
        awaited::poll(self, waker)
    }

    /// Gives the buffers back, once.
    pub(in crate::process_group) fn give<B>(&self, buffers: Option<B>) -> Result<B> {
        buffers.ok_or_else(|| Error::invalid(self.op, "the call's buffers were given back before"))
    }

    /// Waits until the stream has passed the event, or the group's deadline.
    pub(in crate::process_group) fn wait(&self) -> Result<()> {
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
    pub(in crate::process_group) fn wait_for(&self, timeout: Duration) -> Result<bool> {
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

/// Opens GPU `number`.
pub(in crate::process_group) fn open(number: usize) -> Result<Arc<CudaContext>> {
    CudaContext::new(number).map_err(|e| cuda("init_process_group", format!("opening GPU {number}"), e))
}

/// Makes the GPU the calling thread's.
pub(in crate::process_group) fn bind(op: &str, context: &CudaContext) -> Result<()> {
    context.bind_to_thread().map_err(|e| cuda(op, "taking the GPU", e))
}
