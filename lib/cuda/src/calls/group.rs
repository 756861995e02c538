//! Several calls enqueued together.

use super::fused::Run;
use crate::checked::call::Stream;
use crate::checked::messages::Messages;
use crate::comm::DeviceComm;
use crate::peer::needs_extension;
use tinynccl_comm::RawCall;
use tinynccl_plan::device::Path;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Collective;

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
        let long: Vec<usize> = messages.peers_by_slots(self.rank()).collect();
        self.offer_extension(long.iter().copied())?;
        self.path.prepare_messages(&long)
    }

    /// Enqueues calls on a stream, as a [`Group`].
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`], for every call.
    pub unsafe fn enqueue_group(&self, stream: impl Into<Stream>, calls: &[RawCall]) -> Result<()> {
        if let [call] = calls {
            // SAFETY: forwarded from the caller.
            return unsafe { self.enqueue(stream, call) };
        }
        let mut group = self.group(stream);
        // SAFETY: forwarded from the caller.
        calls.iter().try_for_each(|call| unsafe { group.add(call) })?;
        group.finish()
    }

    /// An empty group on a stream.
    pub fn group(&self, stream: impl Into<Stream>) -> Group<'_> {
        Group { comm: self, stream: stream.into(), run: Run::default(), messages: Messages::default() }
    }

    /// True if a call is enqueued as a whole, and not as messages. Kernels have gather and scatter, other paths do not.
    pub(crate) fn is_collective(&self, call: &RawCall) -> bool {
        match call.collective {
            Collective::SendRecv => false,
            Collective::Gather | Collective::Scatter => self.path() == Path::Peer && call.ranges.is_none(),
            _ => call.ranges.is_none(),
        }
    }
}

/// Calls that are enqueued together: the collectives first, in their order, then all messages between two ranks, in an
/// order that cannot deadlock. Calls with a length per rank are made of messages, and on paths without kernels also
/// gather and scatter. Every rank must add the same collectives. Short ones that follow each other, use no buffer that
/// another writes, and reduce with the same type and operator if they reduce, are launched together.
#[must_use = "some calls are enqueued by Group::finish alone"]
pub struct Group<'a> {
    comm: &'a DeviceComm,
    stream: Stream,
    run: Run,
    messages: Messages,
}

impl Group<'_> {
    /// Adds a call.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`], from now until the group is dropped and the stream has run the call.
    pub unsafe fn add(&mut self, call: &RawCall) -> Result<()> {
        let comm = self.comm;
        if comm.is_collective(call) || !self.messages.add(call, comm.rank(), comm.size()) {
            // SAFETY: forwarded from the caller.
            return unsafe { comm.enqueue_in_run(&self.stream, call, &mut self.run) };
        }
        Ok(())
    }

    /// Enqueues the collectives added so far, so that other work can follow them in the stream.
    pub fn flush(&mut self) -> Result<()> {
        // SAFETY: by the callers of `add`.
        unsafe { self.comm.enqueue_run(&self.stream, &mut self.run) }
    }

    /// Enqueues all that is left.
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        let Group { comm, stream, messages, .. } = self;
        // Ahead of the rounds, each of which may wait for an offer.
        comm.offer_extension(messages.peers_by_slots(comm.rank()))?;
        messages
            .launches(comm.rank(), comm.size())?
            .into_iter()
            // SAFETY: by the callers of `add`.
            .try_for_each(|round| unsafe { comm.enqueue_round(stream.clone(), round) })
    }
}
