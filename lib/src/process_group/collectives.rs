//! Blocking calls.
//!
//! `n` is the number of ranks. Lengths, types and ranks that cannot be right give
//! [`Error::InvalidArgument`](crate::Error::InvalidArgument) before anything is sent.

use super::ProcessGroup;
use super::buffer::{Buffer, BufferMut, Spot};
use super::work::Enqueued;
use crate::comm::Inner;
use crate::comm::call::Call;
use crate::cuda::Stream;
use crate::dtype::ReduceOp;
use crate::error::Result;

impl ProcessGroup {
    /// Every rank's `buffer` becomes the element-wise reduction of all of them.
    #[inline]
    pub fn all_reduce<'a>(&self, buffer: impl Into<BufferMut<'a>>, op: ReduceOp) -> Result<()> {
        self.on_one(buffer.into(), |inner, buffer| inner.all_reduce_in_place(buffer, op))
    }

    /// [`ProcessGroup::all_reduce`] from `input` into `output`, of the same length.
    #[inline]
    pub fn all_reduce_into<'a, 'b>(
        &self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<BufferMut<'b>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.all_reduce(input, output, op))
    }

    /// Every rank's `buffer` becomes the root's.
    pub fn broadcast<'a>(&self, buffer: impl Into<BufferMut<'a>>, root: usize) -> Result<()> {
        self.on_one(buffer.into(), |inner, buffer| inner.broadcast(buffer, root))
    }

    /// The root's `buffer` becomes the reduction of all of them; elsewhere it stays as it was.
    pub fn reduce<'a>(&self, buffer: impl Into<BufferMut<'a>>, root: usize, op: ReduceOp) -> Result<()> {
        self.on_one(buffer.into(), |inner, buffer| inner.reduce_in_place(buffer, op, root))
    }

    /// [`ProcessGroup::reduce`] from `input` into the root's `output`; elsewhere `output` is ignored ([`BufferMut::none`]).
    pub fn reduce_into<'a, 'b>(
        &self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<BufferMut<'b>>,
        root: usize,
        op: ReduceOp,
    ) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.reduce(input, output, op, root))
    }

    /// Every rank's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
    pub fn all_gather<'a, 'b>(&self, input: impl Into<Buffer<'a>>, output: impl Into<BufferMut<'b>>) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.all_gather(input, output))
    }

    /// [`ProcessGroup::all_gather`] where our input already lies at segment `rank` of `buffer`.
    pub fn all_gather_in_place<'a>(&self, buffer: impl Into<BufferMut<'a>>) -> Result<()> {
        self.on_one(buffer.into(), |inner, buffer| inner.all_gather_in_place(buffer))
    }

    /// `output` becomes segment `rank` of the reduction of all ranks' `input` (`n` x the output's length).
    pub fn reduce_scatter<'a, 'b>(
        &self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<BufferMut<'b>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.reduce_scatter(input, output, op))
    }

    /// [`ProcessGroup::reduce_scatter`] whose result replaces segment `rank` of `buffer`; the other segments stay.
    pub fn reduce_scatter_in_place<'a>(&self, buffer: impl Into<BufferMut<'a>>, op: ReduceOp) -> Result<()> {
        self.on_one(buffer.into(), |inner, buffer| inner.reduce_scatter_in_place(buffer, op))
    }

    /// The root's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order; elsewhere `output` is ignored
    /// ([`BufferMut::none`]).
    pub fn gather<'a, 'b>(
        &self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<BufferMut<'b>>,
        root: usize,
    ) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.gather(input, output, root))
    }

    /// `output` becomes segment `rank` of the root's `input` (`n` x the output's length); elsewhere `input` is ignored
    /// ([`Buffer::none`]).
    pub fn scatter<'a, 'b>(
        &self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<BufferMut<'b>>,
        root: usize,
    ) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.scatter(input, output, root))
    }

    /// Segment `s` of `output` becomes segment `rank` of rank `s`'s `input`; both have `n` equal segments.
    pub fn all_to_all<'a, 'b>(&self, input: impl Into<Buffer<'a>>, output: impl Into<BufferMut<'b>>) -> Result<()> {
        self.on_two(input.into(), output.into(), |inner, input, output| inner.all_to_all(input, output))
    }

    /// Sends `data` to `peer`, which must receive as many elements of the same type. It may wait for the receiver: ranks that
    /// send to each other before they receive need a [`Batch`](super::Batch).
    pub fn send<'a>(&self, data: impl Into<Buffer<'a>>, peer: usize) -> Result<()> {
        let data = data.into();
        self.comm.not_self("send", peer)?;
        let call = self.comm.inner().send(&data, peer)?;
        // SAFETY: as in `on_one`.
        unsafe { self.carry_out(data.place.spot(), call) }
    }

    /// Receives what `peer` sends to us.
    pub fn recv<'a>(&self, data: impl Into<BufferMut<'a>>, peer: usize) -> Result<()> {
        let mut data = data.into();
        self.comm.not_self("recv", peer)?;
        let call = self.comm.inner().recv(&mut data, peer)?;
        // SAFETY: as in `on_one`.
        unsafe { self.carry_out(data.place.spot(), call) }
    }

    /// Nobody returns before everybody has called. It waits for asynchronous calls on host memory, not for streams.
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: without memory.
        unsafe { self.carry_out(Spot::Host, self.comm.inner().barrier()) }
    }

    /// A call that `make` makes of the buffer that it is given.
    #[inline]
    fn on_one(
        &self,
        mut buffer: BufferMut<'_>,
        make: impl FnOnce(&Inner, &mut BufferMut<'_>) -> Result<Call>,
    ) -> Result<()> {
        let call = make(self.comm.inner(), &mut buffer)?;
        // SAFETY: the call was made of this buffer, which is held until it is over.
        unsafe { self.carry_out(buffer.place.spot(), call) }
    }

    /// The same of an input and an output.
    #[inline]
    fn on_two(
        &self,
        input: Buffer<'_>,
        mut output: BufferMut<'_>,
        make: impl FnOnce(&Inner, &Buffer<'_>, &mut BufferMut<'_>) -> Result<Call>,
    ) -> Result<()> {
        let call = make(self.comm.inner(), &input, &mut output)?;
        let spot = input.place.joined(&output.place, call.key.collective.name())?;
        // SAFETY: as in `on_one`.
        unsafe { self.carry_out(spot, call) }
    }

    /// # Safety
    /// The call's memory must be at `spot`, and valid and untouched by others until this returns.
    #[inline]
    unsafe fn carry_out(&self, spot: Spot<'_>, call: Call) -> Result<()> {
        match spot {
            Spot::Host => {
                let inner = self.comm.inner();
                inner.drain();
                // SAFETY: forwarded from the caller.
                unsafe { self.backend.run(inner, &call, false) }
            }
            // SAFETY: forwarded from the caller.
            Spot::Device(stream) => unsafe { self.enqueue(&[call], stream) }?.wait(),
        }
    }

    /// Puts calls into a stream, and a mark behind them.
    ///
    /// # Safety
    /// As [`Backend::enqueue`](super::Backend::enqueue).
    pub(super) unsafe fn enqueue(&self, calls: &[Call], stream: &Stream) -> Result<Enqueued> {
        // SAFETY: forwarded from the caller.
        let op = unsafe { self.enqueue_unmarked(calls, stream) }?;
        Enqueued::mark(&self.backend, stream, op, self.comm.config().timeout)
    }

    /// Puts calls into a stream; gives their name.
    ///
    /// # Safety
    /// As [`Backend::enqueue`](super::Backend::enqueue).
    pub(super) unsafe fn enqueue_unmarked(&self, calls: &[Call], stream: &Stream) -> Result<&'static str> {
        let op = match calls {
            [one] => one.key.collective.name(),
            _ => "batch",
        };
        self.comm.inner().state().check(|| op.to_owned())?;
        // SAFETY: forwarded from the caller.
        unsafe { self.backend.enqueue(calls, stream) }?;
        Ok(op)
    }
}
