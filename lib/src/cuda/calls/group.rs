//! Several calls enqueued together.

use super::fused::Run;
use crate::comm::RawCall;
use crate::cuda::checked::call::Stream;
use crate::cuda::checked::messages::Messages;
use crate::cuda::comm::DeviceComm;
use crate::cuda::peer::needs_extension;
use crate::device::Path;
use crate::error::Result;
use crate::wire::Collective;

impl DeviceComm {
    /// Makes ready what `calls` need and waits for no other rank: kernels are compiled and loaded, memory that this
    /// rank has to have for larger calls is allocated and offered to the others. Loading code can make CUDA wait for
    /// kernels that run, and these may wait for a rank of the same thread; a first large call waits until the other
    /// ranks have offered their memory. So a thread that drives several ranks calls this for all of them before it
    /// makes the first call of any.
    ///
    /// # Errors
    /// Of the compiler and of the driver.
    pub fn prepare<'a>(&self, calls: impl IntoIterator<Item = &'a RawCall>) -> Result<()> {
        self.made(self.make_ready(calls))
    }

    fn make_ready<'a>(&self, calls: impl IntoIterator<Item = &'a RawCall>) -> Result<()> {
        let (mut messages, mut fused) = (Messages::default(), Vec::new());
        for call in calls.into_iter().filter(|_| self.size() > 1) {
            if self.is_collective(call) {
                let choice = self.choice(call.collective, call.bytes());
                self.path.prepare(call, choice)?;
                if needs_extension(choice.protocol) {
                    self.offer_extension(0..self.size())?;
                }
                if self.path.fuses(call, choice) {
                    fused.push(call);
                }
            } else {
                messages.add(call, self.rank(), self.size());
            }
        }
        self.path.prepare_fused(&fused)?;
        if messages.is_empty() {
            return Ok(());
        }
        self.offer_extension(messages.peers_by_slots(self.rank()))?;
        self.path.prepare_messages()
    }

    /// Enqueues calls on a stream: the collectives first, in their order, then all messages between two ranks, in an
    /// order that cannot deadlock. Calls with a length per rank are made of messages, and on paths without kernels also
    /// gather and scatter. Every rank must pass the same collectives. Short ones that follow each other, use no buffer
    /// that another writes, and reduce with the same type and operator if they reduce, are launched together.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`], for every call.
    pub unsafe fn enqueue_group(&self, stream: impl Into<Stream>, calls: &[RawCall]) -> Result<()> {
        let stream = stream.into();
        if let [call] = calls
            && self.is_collective(call)
        {
            // SAFETY: forwarded from the caller.
            return unsafe { self.enqueue(stream, call) };
        }
        let (rank, size) = (self.rank(), self.size());
        let (mut messages, mut run) = (Messages::default(), Run::default());
        for call in calls {
            if self.is_collective(call) || !messages.add(call, rank, size) {
                // SAFETY: forwarded from the caller.
                unsafe { self.enqueue_in_run(&stream, call, &mut run) }?;
            }
        }
        // SAFETY: see above.
        unsafe { self.enqueue_run(&stream, &mut run) }?;
        // Ahead of the rounds, each of which may wait for an offer.
        self.offer_extension(messages.peers_by_slots(self.rank()))?;
        for round in messages.launches(rank, size)? {
            // SAFETY: forwarded from the caller.
            unsafe { self.enqueue_round(stream.clone(), round) }?;
        }
        Ok(())
    }

    /// True if a call is enqueued as a whole, and not as messages. Kernels have gather and scatter, other paths do not.
    pub(in crate::cuda) fn is_collective(&self, call: &RawCall) -> bool {
        match call.collective {
            Collective::SendRecv => false,
            Collective::Gather | Collective::Scatter => self.path() == Path::Peer && call.ranges.is_none(),
            _ => call.ranges.is_none(),
        }
    }
}
