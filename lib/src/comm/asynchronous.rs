//! Asynchronous collectives: the call owns its buffers and gives them back through [`Work`].

use std::sync::Arc;

use super::call::Call;
use super::{Comm, Inner, OwnedBuffer, Work};
use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::executor::CallKey;
use crate::trace::{self, Span};

impl Comm {
    /// Queues `prepare`'s call on `buffers`, which the queue owns until it is complete.
    pub(super) fn submit<B: Send + 'static>(
        &self,
        buffers: B,
        prepare: impl FnOnce(&Inner, &mut B) -> Result<Call> + Send + 'static,
    ) -> Result<Work<B>> {
        // SAFETY: the buffers belong to the job until the call is complete, and nobody else sees them.
        self.submit_with(buffers, prepare, |inner, call| unsafe { inner.execute(call, true) })
    }

    /// As `submit`, carried out by somebody else.
    pub(crate) fn submit_with<B: Send + 'static>(
        &self,
        buffers: B,
        prepare: impl FnOnce(&Inner, &mut B) -> Result<Call> + Send + 'static,
        carry_out: impl FnOnce(&Inner, &Call) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        let queued = self.inner.state.trace.as_ref().map(|_| trace::now());
        self.submit_job(buffers, move |inner, buffers| {
            let call = prepare(inner, buffers)?;
            if let (Some(trace), Some(queued)) = (&inner.state.trace, queued) {
                let CallKey { collective, count, dtype, .. } = call.key;
                let bytes = (count * dtype.size()) as u64;
                trace.span(queued, Span::Queued { collective: collective as u8, bytes });
            }
            carry_out(inner, &call)
        })
    }

    /// Queues `run` on `buffers`, which the queue owns until it returns.
    pub(super) fn submit_job<B: Send + 'static>(
        &self,
        mut buffers: B,
        run: impl FnOnce(&Inner, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        self.inner.state.check(|| "asynchronous call".to_owned())?;
        let (work, complete) = Work::pair(self.inner.state.origin, self.rank());
        let inner = Arc::clone(&self.inner);
        let job = move |_background| {
            let outcome = run(&inner, &mut buffers);
            drop(inner);
            complete(outcome.map(|()| buffers));
            None
        };
        self.inner.queue.push(|| format!("tinynccl-{}", self.inner.state.id), false, Box::new(job))?;
        Ok(work)
    }

    /// [`Comm::all_reduce_in_place`], asynchronously.
    pub fn all_reduce_async<B: OwnedBuffer>(&self, buffer: B, op: ReduceOp) -> Result<Work<B>> {
        self.submit(buffer, move |inner, buffer| inner.all_reduce_in_place(&mut **buffer, op))
    }

    /// [`Comm::broadcast`], asynchronously.
    pub fn broadcast_async<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        self.inner.peer_in_range("broadcast", "root", root)?;
        self.submit(buffer, move |inner, buffer| inner.broadcast(&mut **buffer, root))
    }

    /// [`Comm::all_gather`], asynchronously; gives `(input, output)` back.
    pub fn all_gather_async<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
        &self,
        input: I,
        output: O,
    ) -> Result<Work<(I, O)>> {
        self.submit((input, output), |inner, (input, output)| inner.all_gather(&**input, &mut **output))
    }

    /// [`Comm::reduce_scatter`], asynchronously; gives `(input, output)` back.
    pub fn reduce_scatter_async<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
        &self,
        input: I,
        output: O,
        op: ReduceOp,
    ) -> Result<Work<(I, O)>> {
        self.submit((input, output), move |inner, (input, output)| inner.reduce_scatter(&**input, &mut **output, op))
    }

    /// [`Comm::all_to_all`], asynchronously; gives `(input, output)` back.
    pub fn all_to_all_async<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
        &self,
        input: I,
        output: O,
    ) -> Result<Work<(I, O)>> {
        self.submit((input, output), |inner, (input, output)| inner.all_to_all(&**input, &mut **output))
    }

    /// [`Comm::reduce`], asynchronously; gives `(input, output)` back.
    pub fn reduce_async<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
        &self,
        input: I,
        output: O,
        op: ReduceOp,
        root: usize,
    ) -> Result<Work<(I, O)>> {
        self.inner.peer_in_range("reduce", "root", root)?;
        self.submit((input, output), move |inner, (input, output)| inner.reduce(&**input, &mut **output, op, root))
    }

    /// [`Comm::gather`], asynchronously; gives `(input, output)` back.
    pub fn gather_async<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
        &self,
        input: I,
        output: O,
        root: usize,
    ) -> Result<Work<(I, O)>> {
        self.inner.peer_in_range("gather", "root", root)?;
        self.submit((input, output), move |inner, (input, output)| inner.gather(&**input, &mut **output, root))
    }

    /// [`Comm::scatter`], asynchronously; gives `(input, output)` back.
    pub fn scatter_async<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
        &self,
        input: I,
        output: O,
        root: usize,
    ) -> Result<Work<(I, O)>> {
        self.inner.peer_in_range("scatter", "root", root)?;
        self.submit((input, output), move |inner, (input, output)| inner.scatter(&**input, &mut **output, root))
    }
}
