//! Several calls enqueued together.

use super::call::Stream;
use super::comm::DeviceComm;
use super::messages::Messages;
use crate::comm::RawCall;
use crate::error::Result;
use crate::wire::Collective;

impl DeviceComm {
    /// Makes ready what `calls` need, so that [`DeviceComm::enqueue_group`] only launches: kernels are compiled and
    /// loaded. Loading code can make CUDA wait for kernels that run, and these may wait for a rank of the same thread:
    /// a thread that drives several ranks calls this for all of them before it makes the first call of any.
    ///
    /// # Errors
    /// Of the compiler and of the driver.
    pub fn prepare<'a>(&self, calls: impl IntoIterator<Item = &'a RawCall>) -> Result<()> {
        let mut messages = false;
        for call in calls.into_iter().filter(|_| self.size() > 1) {
            match is_collective(call) {
                true => self.path.prepare(call, self.choice(call.collective, call.bytes()))?,
                false => messages = true,
            }
        }
        if messages { self.path.prepare_messages() } else { Ok(()) }
    }

    /// Enqueues calls on a stream: the collectives first, in their order, then all messages between two ranks, in an
    /// order that cannot deadlock. Gather, scatter and calls with a length per rank are made of messages. Every rank
    /// must pass the same collectives.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`], for every call.
    pub unsafe fn enqueue_group(&self, stream: impl Into<Stream>, calls: &[RawCall]) -> Result<()> {
        let stream = stream.into();
        let (rank, size) = (self.rank(), self.size());
        let mut messages = Messages::default();
        for call in calls {
            if is_collective(call) || !messages.add(call, rank, size) {
                // SAFETY: forwarded from the caller.
                unsafe { self.enqueue(stream.clone(), call) }?;
            }
        }
        for round in messages.launches(rank, size)? {
            // SAFETY: forwarded from the caller.
            unsafe { self.enqueue_round(stream.clone(), round) }?;
        }
        Ok(())
    }
}

/// Whether a call is enqueued as a whole, and not as messages.
fn is_collective(call: &RawCall) -> bool {
    let messages = matches!(call.collective, Collective::SendRecv | Collective::Gather | Collective::Scatter);
    !messages && call.ranges().is_none()
}
