//! Asynchronous calls: they own their buffers and give them back through [`Work`].
//!
//! On host memory they run on the group's progress thread, in order; on device memory they are in the stream when the call
//! returns.

use std::sync::Arc;

use super::buffer::{Buffer, BufferMut, Place, Spot};
use super::{Owned, ProcessGroup, Work};
use crate::comm::Inner;
use crate::comm::call::Call;
use crate::dtype::ReduceOp;
use crate::error::Result;

impl ProcessGroup {
    /// [`ProcessGroup::all_reduce`], asynchronously.
    pub fn all_reduce_async<B: Owned>(&self, buffer: B, op: ReduceOp) -> Result<Work<B>> {
        self.in_place(buffer, move |inner, buffer| inner.all_reduce_in_place(buffer, op))
    }

    /// [`ProcessGroup::broadcast`], asynchronously.
    pub fn broadcast_async<B: Owned>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        self.in_place(buffer, move |inner, buffer| inner.broadcast(buffer, root))
    }

    /// [`ProcessGroup::reduce`], asynchronously.
    pub fn reduce_async<B: Owned>(&self, buffer: B, root: usize, op: ReduceOp) -> Result<Work<B>> {
        self.in_place(buffer, move |inner, buffer| inner.reduce_in_place(buffer, op, root))
    }

    /// [`ProcessGroup::all_gather`], asynchronously; gives `(input, output)` back.
    pub fn all_gather_async<I: Owned, O: Owned>(&self, input: I, output: O) -> Result<Work<(I, O)>> {
        self.out_of_place("all_gather", input, output, |inner, input, output| inner.all_gather(input, output))
    }

    /// [`ProcessGroup::reduce_scatter`], asynchronously; gives `(input, output)` back.
    pub fn reduce_scatter_async<I: Owned, O: Owned>(&self, input: I, output: O, op: ReduceOp) -> Result<Work<(I, O)>> {
        self.out_of_place("reduce_scatter", input, output, move |inner, input, output| {
            inner.reduce_scatter(input, output, op)
        })
    }

    /// [`ProcessGroup::gather`], asynchronously; gives `(input, output)` back.
    pub fn gather_async<I: Owned, O: Owned>(&self, input: I, output: O, root: usize) -> Result<Work<(I, O)>> {
        self.out_of_place("gather", input, output, move |inner, input, output| inner.gather(input, output, root))
    }

    /// [`ProcessGroup::scatter`], asynchronously; gives `(input, output)` back.
    pub fn scatter_async<I: Owned, O: Owned>(&self, input: I, output: O, root: usize) -> Result<Work<(I, O)>> {
        self.out_of_place("scatter", input, output, move |inner, input, output| inner.scatter(input, output, root))
    }

    /// [`ProcessGroup::all_to_all`], asynchronously; gives `(input, output)` back.
    pub fn all_to_all_async<I: Owned, O: Owned>(&self, input: I, output: O) -> Result<Work<(I, O)>> {
        self.out_of_place("all_to_all", input, output, |inner, input, output| inner.all_to_all(input, output))
    }

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
        prepare: impl Fn(&Inner, &mut BufferMut<'_>) -> Result<Call> + Send + 'static,
    ) -> Result<Work<B>> {
        let inner = self.comm.inner();
        let mut memory = buffer.output();
        // Also on the host: what cannot be right fails here and not in `wait`.
        let call = prepare(inner, &mut memory)?;
        if let Spot::Device(stream) = memory.place.spot() {
            // SAFETY: the memory belongs to the work until the stream has passed the call; cudarc keeps it from being freed
            // before.
            let call = unsafe { self.enqueue(&[call], stream) }?;
            drop(memory);
            return Ok(Work::enqueued(call, buffer));
        }
        drop(memory);
        self.queue(buffer, move |inner, buffer| prepare(inner, &mut buffer.output()))
    }

    fn out_of_place<I: Owned, O: Owned>(
        &self,
        op: &'static str,
        input: I,
        mut output: O,
        prepare: impl Fn(&Inner, &Buffer<'_>, &mut BufferMut<'_>) -> Result<Call> + Send + 'static,
    ) -> Result<Work<(I, O)>> {
        let inner = self.comm.inner();
        let (from, mut to) = (input.input(), output.output());
        let call = prepare(inner, &from, &mut to)?;
        if let Spot::Device(stream) = Place::joined(&from.place, &to.place, op)? {
            // SAFETY: as in `in_place`.
            let call = unsafe { self.enqueue(&[call], stream) }?;
            drop((from, to));
            return Ok(Work::enqueued(call, (input, output)));
        }
        drop((from, to));
        self.queue((input, output), move |inner, (input, output)| prepare(inner, &input.input(), &mut output.output()))
    }

    fn queue<B: Send + 'static>(
        &self,
        buffers: B,
        prepare: impl FnOnce(&Inner, &mut B) -> Result<Call> + Send + 'static,
    ) -> Result<Work<B>> {
        let backend = Arc::clone(&self.backend);
        let work = self.comm.submit_with(buffers, prepare, move |inner, call| {
            // SAFETY: the buffers belong to the job until the call is complete, and nobody else sees them.
            unsafe { backend.run(inner, call, true) }
        })?;
        Ok(work.into())
    }
}
