//! Asynchronous collectives: the call owns its buffers and gives them back through [`Work`].

use std::sync::Arc;

use super::table::{asked, collectives};
use crate::RawCall;
use crate::engine::queue::InFlight;
use crate::trace::{self, Span};
use crate::{Comm, Inner, OwnedBuffer, Work};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::ReduceOp;
use tinynccl_plan::error::Result;

impl Comm {
    /// Queues `prepare`'s call on `buffers`, which the queue owns until it is complete.
    pub(super) fn submit<B: Send + 'static>(
        &self,
        buffers: B,
        prepare: impl FnOnce(&Inner, &mut B) -> Result<RawCall> + Send + 'static,
    ) -> Result<Work<B>> {
        // SAFETY: the buffers belong to the job alone until the call is complete.
        self.submit_with(buffers, prepare, |inner, call| unsafe { inner.execute(call, true) })
    }

    /// As `submit`, for calls that another component runs.
    pub fn submit_with<B: Send + 'static>(
        &self,
        buffers: B,
        prepare: impl FnOnce(&Inner, &mut B) -> Result<RawCall> + Send + 'static,
        carry_out: impl FnOnce(&Inner, &RawCall) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        let queued = self.inner.state.trace.as_ref().map(|_| trace::now());
        self.submit_job(buffers, move |inner, buffers| {
            let call = prepare(inner, buffers)?;
            if let (Some(trace), Some(queued)) = (&inner.state.trace, queued) {
                let Call { collective, count, dtype, .. } = call.call;
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
        let (work, completer) = Work::pair(self.inner.state.origin, self.rank());
        let inner = Arc::clone(&self.inner);
        let job = move |_background, in_flight: InFlight<'_>| {
            let outcome = run(&inner, &mut buffers);
            drop(inner);
            drop(in_flight);
            completer.complete(outcome.map(|()| buffers));
            None
        };
        self.inner.queue.push(|| format!("tinynccl-{}", self.inner.state.id), false, Box::new(job))?;
        Ok(work)
    }
}

macro_rules! asynchronous {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        impl Comm {
            $(asynchronous! { @ $form $async $name $collective $arguments })*
        }
    };
    (@ apart $name:ident $of:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`Comm::", stringify!($of), "`], asynchronously; gives `(input, output)` back.")]
        pub fn $name<I: OwnedBuffer, O: OwnedBuffer<Element = I::Element>>(
            &self,
            input: I,
            output: O
            $(, $arg: $ty)*
        ) -> Result<Work<(I, O)>> {
            let asked = asked!($collective $(, $arg)*);
            self.inner.root_in_range(&asked)?;
            self.submit((input, output), move |inner, (input, output)| inner.call(asked, &**input, &mut **output))
        }
    };
    (@ place $name:ident $of:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("[`Comm::", stringify!($of), "`], asynchronously.")]
        pub fn $name<B: OwnedBuffer>(&self, buffer: B $(, $arg: $ty)*) -> Result<Work<B>> {
            let asked = asked!($collective $(, $arg)*);
            self.inner.root_in_range(&asked)?;
            self.submit(buffer, move |inner, buffer| inner.call_in_place(asked, &mut **buffer))
        }
    };
}
collectives!(asynchronous);
