//! Blocking calls.
//!
//! `n` is the number of ranks. Ranks that have no input or no output in a call pass [`Buffer::none`] or
//! [`BufferMut::none`]. Invalid lengths, types and ranks give
//! [`Error::InvalidArgument`](tinynccl_plan::Error::InvalidArgument) before anything is sent.

use super::ProcessGroup;
use super::buffer::{Buffer, BufferMut, Spot};
use super::gpu::{Enqueued, Stream};
use tinynccl_comm::RawCall;
use tinynccl_comm::calls::table::{asked, collectives};
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::error::Result;

macro_rules! blocking {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        impl ProcessGroup {
            $(blocking! { @ $form $name $collective $arguments })*
        }
    };
    (@ apart $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`Comm::", stringify!($name), "`](tinynccl_comm::Comm::", stringify!($name), ") by the group's backend.")]
        #[inline]
        pub fn $name<'a, 'b>(
            &self,
            input: impl Into<Buffer<'a>>,
            output: impl Into<BufferMut<'b>>
            $(, $arg: $ty)*
        ) -> Result<()> {
            let (input, mut output) = (input.into(), output.into());
            let call = self.comm.inner().call(asked!($collective $(, $arg)*), &input, &mut output)?;
            let spot = input.place.joined(&output.place, call.collective.name())?;
            // SAFETY: the call was made of these buffers, which are held until it is over.
            unsafe { self.carry_out(spot, call) }
        }
    };
    (@ place $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`Comm::", stringify!($name), "`](tinynccl_comm::Comm::", stringify!($name), ") by the group's backend.")]
        #[inline]
        pub fn $name<'a>(&self, buffer: impl Into<BufferMut<'a>> $(, $arg: $ty)*) -> Result<()> {
            let mut buffer = buffer.into();
            let call = self.comm.inner().call_in_place(asked!($collective $(, $arg)*), &mut buffer)?;
            // SAFETY: the call was made of this buffer, which is held until it is over.
            unsafe { self.carry_out(buffer.place.spot(), call) }
        }
    };
}
collectives!(blocking);

impl ProcessGroup {
    /// Sends `data` to `peer`, which must receive as many elements of the same type. It may wait for the receiver:
    /// ranks that send to each other before they receive need a [`Batch`](super::Batch).
    pub fn send<'a>(&self, data: impl Into<Buffer<'a>>, peer: usize) -> Result<()> {
        let data = data.into();
        self.comm.not_self("send", peer)?;
        let call = self.comm.inner().send(&data, peer)?;
        // SAFETY: the call was made of this buffer, which is held until it is over.
        unsafe { self.carry_out(data.place.spot(), call) }
    }

    /// Receives a message of `peer`.
    pub fn recv<'a>(&self, data: impl Into<BufferMut<'a>>, peer: usize) -> Result<()> {
        let mut data = data.into();
        self.comm.not_self("recv", peer)?;
        let call = self.comm.inner().recv(&mut data, peer)?;
        // SAFETY: the call was made of this buffer, which is held until it is over.
        unsafe { self.carry_out(data.place.spot(), call) }
    }

    /// No rank returns before all ranks have called. It waits for asynchronous calls on host memory, not for streams.
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: without memory.
        unsafe { self.carry_out(Spot::Host, self.comm.inner().barrier()) }
    }

    /// # Safety
    /// The call's memory must be at `spot`, and valid and untouched by others until this returns.
    #[inline]
    unsafe fn carry_out(&self, spot: Spot<'_>, call: RawCall) -> Result<()> {
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

    /// Enqueues calls on a stream, and an event after them.
    ///
    /// # Safety
    /// As [`Backend::enqueue`](super::Backend::enqueue).
    pub(super) unsafe fn enqueue(&self, calls: &[RawCall], stream: &Stream) -> Result<Enqueued> {
        // SAFETY: forwarded from the caller.
        let op = unsafe { self.enqueue_unmarked(calls, stream) }?;
        self.mark(stream, op)
    }

    /// An event after the work in a stream, to wait for at most until the group's deadline.
    pub(super) fn mark(&self, stream: &Stream, op: &'static str) -> Result<Enqueued> {
        Enqueued::mark(&self.backend, stream, op, self.comm.config().timeout)
    }

    /// Enqueues calls on a stream; returns their name.
    ///
    /// # Safety
    /// As [`Backend::enqueue`](super::Backend::enqueue).
    pub(super) unsafe fn enqueue_unmarked(&self, calls: &[RawCall], stream: &Stream) -> Result<&'static str> {
        let op = match calls {
            [one] => one.collective.name(),
            _ => "batch",
        };
        self.comm.inner().state().check(|| op.to_owned())?;
        // SAFETY: forwarded from the caller.
        unsafe { self.backend.enqueue(calls, stream) }?;
        Ok(op)
    }
}
