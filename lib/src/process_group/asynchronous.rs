//! Asynchronous calls: they own their buffers and give them back through [`Work`].
//!
//! On host memory they run on the group's progress thread, in order. On device memory they are enqueued when the call
//! returns.

use std::sync::Arc;

use super::buffer::{BufferMut, Place, Spot};
use super::{Owned, ProcessGroup, Work};
use tinynccl_comm::Inner;
use tinynccl_comm::RawCall;
use tinynccl_comm::calls::table::{asked, collectives};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::error::Result;

macro_rules! asynchronous {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        impl ProcessGroup {
            $(asynchronous! { @ $form $async $name $collective $arguments })*
        }
    };
    (@ apart $name:ident $of:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`ProcessGroup::", stringify!($of), "`], asynchronously; gives `(input, output)` back.")]
        pub fn $name<I: Owned, O: Owned>(&self, input: I, output: O $(, $arg: $ty)*) -> Result<Work<(I, O)>> {
            self.apart(asked!($collective $(, $arg)*), input, output)
        }
    };
    (@ place $name:ident $of:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`ProcessGroup::", stringify!($of), "`], asynchronously.")]
        pub fn $name<B: Owned>(&self, buffer: B $(, $arg: $ty)*) -> Result<Work<B>> {
            let asked = asked!($collective $(, $arg)*);
            self.in_place(buffer, move |inner, buffer| inner.call_in_place(asked, buffer))
        }
    };
}
collectives!(asynchronous);

impl ProcessGroup {
    /// [`ProcessGroup::send`], asynchronously.
    pub fn send_async<B: Owned>(&self, data: B, peer: usize) -> Result<Work<B>> {
        self.comm.not_self("send", peer)?;
        self.in_place(data, move |inner, data| inner.send(data, peer))
    }

    /// [`ProcessGroup::recv`], asynchronously.
    pub fn recv_async<B: Owned>(&self, data: B, peer: usize) -> Result<Work<B>> {
        self.comm.not_self("recv", peer)?;
        self.in_place(data, move |inner, data| inner.recv(data, peer))
    }

    /// [`ProcessGroup::barrier`], asynchronously.
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.in_place((), |inner, _| Ok(inner.barrier()))
    }

    fn in_place<B: Owned>(
        &self,
        mut buffer: B,
        prepare: impl Fn(&Inner, &mut BufferMut<'_>) -> Result<RawCall> + Send + 'static,
    ) -> Result<Work<B>> {
        let inner = self.comm.inner();
        let mut memory = buffer.output();
        // Also on the host: invalid arguments fail here and not in `wait`.
        let call = prepare(inner, &mut memory)?;
        if let Spot::Device(stream) = memory.place.spot() {
            // SAFETY: the memory belongs to the work until the stream has passed the call; cudarc keeps it from being
            // freed before.
            let call = unsafe { self.enqueue(&[call], stream) }?;
            drop(memory);
            return Ok(Work::enqueued(call, buffer));
        }
        drop(memory);
        self.queue(buffer, move |inner, buffer| prepare(inner, &mut buffer.output()))
    }

    fn apart<I: Owned, O: Owned>(&self, asked: Call, input: I, mut output: O) -> Result<Work<(I, O)>> {
        let (from, mut to) = (input.input(), output.output());
        let call = self.comm.inner().call(asked, &from, &mut to)?;
        if let Spot::Device(stream) = Place::joined(&from.place, &to.place, asked.collective.name())? {
            // SAFETY: as in `in_place`.
            let call = unsafe { self.enqueue(&[call], stream) }?;
            drop((from, to));
            return Ok(Work::enqueued(call, (input, output)));
        }
        drop((from, to));
        self.queue((input, output), move |inner, (input, output)| {
            inner.call(asked, &input.input(), &mut output.output())
        })
    }

    fn queue<B: Send + 'static>(
        &self,
        buffers: B,
        prepare: impl FnOnce(&Inner, &mut B) -> Result<RawCall> + Send + 'static,
    ) -> Result<Work<B>> {
        let backend = Arc::clone(&self.backend);
        let work = self.comm.submit_with(buffers, prepare, move |inner, call| {
            // SAFETY: the buffers belong to the job alone until the call is complete.
            unsafe { backend.run(inner, call, true) }
        })?;
        Ok(work.into())
    }
}
