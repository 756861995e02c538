//! Several calls enqueued together.

use super::call::Stream;
use super::comm::DeviceComm;
use super::messages::{Message, Messages};
use crate::comm::RawCall;
use crate::error::Result;
use crate::wire::Collective;

impl DeviceComm {
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
            let has_kernel = call.collective == Collective::AllToAll && call.ranges().is_none();
            if has_kernel || !messages.add(call, rank, size) {
                // SAFETY: forwarded from the caller.
                unsafe { self.enqueue(stream.clone(), call) }?;
            }
        }
        messages.take_own(rank)?;
        // SAFETY: forwarded from the caller, here and below.
        unsafe { messages.enqueue_own(&stream) }?;
        for (send, recv) in messages.rounds(rank, size) {
            let end = |m: Message| (m.address as u64, m.bytes, m.peer);
            // SAFETY: see above.
            unsafe { self.enqueue_send_recv(stream.clone(), send.map(end), recv.map(end)) }?;
        }
        Ok(())
    }
}
