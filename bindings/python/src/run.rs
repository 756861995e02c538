//! Runs a communicator's calls: in a group, at once, on the progress thread, or in a stream.

use std::sync::Arc;

use pyo3::prelude::*;
use tinynccl::wire::Collective;

use crate::calls::{Prepared, operator};
use crate::comm::{Any, Comm};
use crate::errors::{invalid, raise, waiting};
use crate::exporters::torch::current_stream;
use crate::live::Live;
use crate::memory::Device;
use crate::stream::{End, Stream};
use crate::work::{Shared, Work, telling};

/// Calls up to this many bytes stay queued for the waiting thread, as handing them to another thread takes longer.
const SHORT: usize = 64 << 10;

/// The result of a call that may return before it is complete.
#[derive(IntoPyObject)]
pub(crate) enum Made {
    Work(Work),
    End(End),
}

impl Comm {
    /// Adds a call to the open group of this thread, or runs it.
    pub(crate) fn make(
        &self,
        py: Python<'_>,
        call: Prepared,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        let name = call.name();
        let alone = match &mut *self.open_group() {
            Some((thread, calls)) if *thread == std::thread::current().id() => {
                if !async_op {
                    calls.push(call);
                }
                None
            }
            _ => Some(call),
        };
        match alone {
            Some(call) => self.run(py, vec![call], async_op, stream),
            None if async_op => {
                let detail = "async_op inside of a group: give it to the group, comm.group(async_op=True)".to_owned();
                Err(invalid(py, name, detail))
            }
            None => Ok(None),
        }
    }

    pub(crate) fn run(
        &self,
        py: Python<'_>,
        calls: Vec<Prepared>,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        let name = if let [one] = calls.as_slice() { one.name() } else { "group" };
        let live = self.live(py, name)?;
        let device = calls.first().map_or(Device::Host, |call| call.device);
        if let Some(other) = calls.iter().find(|call| call.device != device) {
            let detail = format!(
                "rank {}: {} is on {device}, {} on {}: the calls of a group must be on one device",
                self.name,
                calls[0].name(),
                other.name(),
                other.device
            );
            return Err(invalid(py, "group", detail));
        }
        match device {
            Device::Host => self.run_on_host(py, &live, name, calls, async_op),
            Device::Cuda(ordinal) => {
                let named = stream.or_else(|| calls.iter().find_map(|call| call.stream).map(Stream::from));
                let stream = named.map_or_else(|| current_stream(py, ordinal).map(Stream::from), Ok)?;
                let end = waiting(py, name, &self.names, || {
                    let gpu = live.on(ordinal)?;
                    // SAFETY: lengths were checked against the memory, which is kept by its object. That the object
                    // lives until the stream has run the call is the caller's part, as with every call that only
                    // enqueues.
                    let event = unsafe { gpu.enqueue(&calls, stream) }?;
                    Ok(event.map(|event| End::new(event, &gpu, self.name, &self.names)))
                })?;
                if let Some(end) = end {
                    return Ok(Some(Made::End(end)));
                }
                Ok(async_op.then(|| {
                    let shared = Shared::new(calls.into_iter().flat_map(|call| call.keep).collect(), &self.names);
                    shared.complete(Ok(()));
                    Made::Work(Work::complete(shared, &live, name, self.name))
                }))
            }
        }
    }

    fn run_on_host(
        &self,
        py: Python<'_>,
        live: &Arc<Live>,
        name: &'static str,
        calls: Vec<Prepared>,
        async_op: bool,
    ) -> PyResult<Option<Made>> {
        // Behind calls in flight a blocking one waits in slices, too.
        if async_op || !live.comm.is_idle() {
            let raw = calls.iter().map(|call| call.raw.clone()).collect();
            let short = calls.iter().map(Prepared::bytes).sum::<usize>() <= SHORT;
            let shared = Shared::new(calls.into_iter().flat_map(|call| call.keep).collect(), &self.names);
            let completed = shared.clone();
            let done = move |result| completed.complete(result);
            // SAFETY: lengths were checked against the memory; `shared` keeps it, and the job keeps `shared`.
            let queued = unsafe { live.comm.enqueue_raw(raw, short, done) }.map_err(|e| raise(py, &self.names, &e))?;
            let work = Work::in_flight(shared, queued, live, name, self.name);
            if async_op {
                if telling() {
                    // `Work.wait` reports an error of the call; a signal is raised here.
                    work.finish(py, None).or_else(|raised| if work.is_over() { Ok(()) } else { Err(raised) })?;
                }
                return Ok(Some(Made::Work(work)));
            }
            return work.finish(py, None).map(|()| None);
        }
        if let [one] = calls.as_slice() {
            let raw = [one.raw.clone()];
            // SAFETY: lengths were checked against the memory; `calls` keeps it until this has returned.
            return waiting(py, name, &self.names, || unsafe { live.comm.run_raw(&raw) }).map(|()| None);
        }
        let raw: Vec<_> = calls.iter().map(|call| call.raw.clone()).collect();
        // SAFETY: as above.
        waiting(py, name, &self.names, || unsafe { live.comm.run_raw(&raw) }).map(|()| None)
    }

    #[expect(clippy::too_many_arguments, reason = "what a collective is, as Python gives it")]
    pub(crate) fn even(
        &self,
        py: Python<'_>,
        collective: Collective,
        op: Option<&str>,
        root: i64,
        input: Option<&Any<'_>>,
        output: Option<&Any<'_>>,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        let asker = self.asker(py, collective.name());
        let root = asker.rank_of("root", root)?;
        let op = op.map(|name| operator(&asker, name)).transpose()?;
        let call = asker.even(collective, op, root, input, output)?;
        self.make(py, call, async_op, stream)
    }
}
