//! `Comm`: a communicator of the library, and on first use one on the GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tinynccl::bootstrap::UniqueId;
use tinynccl::wire::Collective;

use crate::calls::{Asker, Prepared, operator};
use crate::errors::{Names, invalid, not_inside, raise, raise_plainly, waiting};
use crate::exporters::torch::current_stream;
use crate::group::{Group, Open};
use crate::join::{config, joining};
use crate::live::{Live, Slot, take};
use crate::memory::Device;
use crate::server::Server;
use crate::stream::{End, Stream};
use crate::work::{Shared, Work, telling};

/// Calls up to this many bytes stay queued for the waiting thread, as handing them to another thread takes longer.
const SHORT: usize = 64 << 10;

type Any<'py> = Bound<'py, PyAny>;

/// The result of a call that may return before it is complete.
#[derive(IntoPyObject)]
pub(crate) enum Made {
    Work(Work),
    End(End),
}

/// One rank's membership in a group of ranks.
#[pyclass(frozen, weakref, module = "tinynccl._core")]
pub(crate) struct Comm {
    live: Arc<Slot>,
    group: Mutex<Open>,
    rank: usize,
    size: usize,
    local_rank: usize,
    /// Our rank's number in errors.
    name: usize,
    names: Names,
}

impl Drop for Comm {
    fn drop(&mut self) {
        drop(take(&self.live));
    }
}

impl Comm {
    fn new(comm: tinynccl::Comm, names: Names) -> Comm {
        let (rank, size, local_rank) = (comm.rank(), comm.size(), comm.local_rank());
        let name = names.get(rank).copied().unwrap_or(rank);
        let live = Live::open(comm);
        Comm { live, group: Mutex::new(None), rank, size, local_rank, name, names }
    }

    /// Returns the open communicator, for a call that may wait; an error once it is closed, or while this thread waits
    /// in another call.
    pub(crate) fn live(&self, py: Python<'_>, op: &'static str) -> PyResult<Arc<Live>> {
        not_inside(py, op, self.name)?;
        self.open(py, op)
    }

    fn open(&self, py: Python<'_>, op: &'static str) -> PyResult<Arc<Live>> {
        // Not under the lock: making an exception runs the interpreter, which may run any code.
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner).clone();
        live.ok_or_else(|| invalid(py, op, format!("rank {}: the communicator is closed", self.name)))
    }

    fn asker<'py>(&self, py: Python<'py>, op: &'static str) -> Asker<'py> {
        Asker { py, op, rank: self.rank, name: self.name, size: self.size }
    }

    pub(crate) fn open_group(&self) -> MutexGuard<'_, Open> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call to the open group of this thread, or runs it.
    fn make(&self, py: Python<'_>, call: Prepared, async_op: bool, stream: Option<Stream>) -> PyResult<Option<Made>> {
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
    fn even(
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

#[pymethods]
impl Comm {
    #[new]
    #[pyo3(signature = (unique_id, rank, world_size, *, timeout=None, transport=None, server=None, cuda_blocks=None, ranks=None, watch=None))]
    #[expect(clippy::too_many_arguments, reason = "what a place in a job is, as Python gives it")]
    fn py_new(
        py: Python<'_>,
        unique_id: &str,
        rank: usize,
        world_size: usize,
        timeout: Option<f64>,
        transport: Option<&str>,
        server: Option<&Server>,
        cuda_blocks: Option<usize>,
        ranks: Option<Vec<usize>>,
        watch: Option<&Any<'_>>,
    ) -> PyResult<Comm> {
        let names: Names = ranks.unwrap_or_default().into();
        if !names.is_empty() && names.len() != world_size {
            return Err(invalid(py, "Comm", format!("{} numbers of ranks, expected {world_size}", names.len())));
        }
        let config = config(py, timeout, transport, cuda_blocks)?;
        let id: UniqueId = unique_id.parse().map_err(|e| raise_plainly(py, &e))?;
        if let Some(own) = server.map(Server::unique_id).filter(|own| *own != unique_id) {
            return Err(invalid(py, "Comm", format!("unique_id is {unique_id}, but that of the server is {own}")));
        }
        let server = server.and_then(Server::take);
        let comm = joining(py, &names, watch, move || match server {
            Some(server) => tinynccl::Comm::init_with_server(server, rank, world_size, config),
            None => tinynccl::Comm::init(&id, rank, world_size, config),
        })?;
        Ok(Comm::new(comm, names))
    }

    #[staticmethod]
    #[pyo3(signature = (*, timeout=None, transport=None))]
    fn from_env(py: Python<'_>, timeout: Option<f64>, transport: Option<&str>) -> PyResult<Comm> {
        let config = config(py, timeout, transport, None)?;
        let names = Names::default();
        let comm = joining(py, &names, None, move || tinynccl::Comm::from_env_with(config))?;
        Ok(Comm::new(comm, names))
    }

    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    #[getter]
    fn local_rank(&self) -> usize {
        self.local_rank
    }

    #[getter]
    fn closed(&self) -> bool {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    #[getter]
    fn timeout(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.open(py, "timeout")?.comm.config().timeout.as_secs_f64())
    }

    #[pyo3(signature = (input, output=None, op="sum", *, async_op=false, stream=None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: Option<&Any<'_>>,
        op: &str,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        self.even(py, Collective::AllReduce, Some(op), 0, Some(input), output, async_op, stream)
    }

    #[pyo3(signature = (buffer, root=0, *, async_op=false, stream=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        buffer: &Any<'_>,
        root: i64,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        self.even(py, Collective::Broadcast, None, root, Some(buffer), Some(buffer), async_op, stream)
    }

    #[pyo3(signature = (input, output=None, op="sum", root=0, *, async_op=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "what a reduce is")]
    fn reduce(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: Option<&Any<'_>>,
        op: &str,
        root: i64,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        self.even(py, Collective::Reduce, Some(op), root, Some(input), output, async_op, stream)
    }

    #[pyo3(signature = (input, output, recv_counts=None, *, async_op=false, stream=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: &Any<'_>,
        recv_counts: Option<Vec<usize>>,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        match recv_counts {
            None => self.even(py, Collective::AllGather, None, 0, Some(input), Some(output), async_op, stream),
            Some(recv) => {
                let call = self.asker(py, "all_gather").uneven(input, None, output, &recv)?;
                self.make(py, call, async_op, stream)
            }
        }
    }

    #[pyo3(signature = (input, output, op="sum", *, async_op=false, stream=None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: &Any<'_>,
        op: &str,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        self.even(py, Collective::ReduceScatter, Some(op), 0, Some(input), Some(output), async_op, stream)
    }

    #[pyo3(signature = (input, output=None, root=0, *, async_op=false, stream=None))]
    fn gather(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: Option<&Any<'_>>,
        root: i64,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        self.even(py, Collective::Gather, None, root, Some(input), output, async_op, stream)
    }

    #[pyo3(signature = (input, output, root=0, *, async_op=false, stream=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        input: Option<&Any<'_>>,
        output: &Any<'_>,
        root: i64,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        self.even(py, Collective::Scatter, None, root, input, Some(output), async_op, stream)
    }

    #[pyo3(signature = (input, output, send_counts=None, recv_counts=None, *, async_op=false, stream=None))]
    #[expect(clippy::too_many_arguments, reason = "what an all_to_all is")]
    fn all_to_all(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: &Any<'_>,
        send_counts: Option<Vec<usize>>,
        recv_counts: Option<Vec<usize>>,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        let asker = self.asker(py, "all_to_all");
        match (send_counts, recv_counts) {
            (None, None) => self.even(py, Collective::AllToAll, None, 0, Some(input), Some(output), async_op, stream),
            (Some(send), Some(recv)) => {
                let call = asker.uneven(input, Some(&send), output, &recv)?;
                self.make(py, call, async_op, stream)
            }
            _ => Err(asker.refuse("send_counts without recv_counts, or the other way round: give both".to_owned())),
        }
    }

    #[pyo3(signature = (data, peer, *, async_op=false, stream=None))]
    fn send(
        &self,
        py: Python<'_>,
        data: &Any<'_>,
        peer: i64,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        let call = self.asker(py, "send").message(data, peer, true)?;
        self.make(py, call, async_op, stream)
    }

    #[pyo3(signature = (data, peer, *, async_op=false, stream=None))]
    fn recv(
        &self,
        py: Python<'_>,
        data: &Any<'_>,
        peer: i64,
        async_op: bool,
        stream: Option<Stream>,
    ) -> PyResult<Option<Made>> {
        let call = self.asker(py, "recv").message(data, peer, false)?;
        self.make(py, call, async_op, stream)
    }

    #[pyo3(signature = (peer, timeout=0.0))]
    fn probe(&self, py: Python<'_>, peer: i64, timeout: f64) -> PyResult<bool> {
        let live = self.live(py, "probe")?;
        let asker = self.asker(py, "probe");
        let peer = asker.rank_of("peer", peer)?;
        let limit = Duration::try_from_secs_f64(timeout)
            .map_err(|e| asker.refuse(format!("a timeout of {timeout} seconds: {e}")))?;
        waiting(py, "probe", &self.names, || live.comm.probe(peer, limit))
    }

    #[pyo3(signature = (*, async_op=false))]
    fn barrier(&self, py: Python<'_>, async_op: bool) -> PyResult<Option<Made>> {
        let live = self.live(py, "barrier")?;
        waiting(py, "barrier", &self.names, || {
            // The thread that creates it holds this lock, and may need the interpreter's.
            let gpu = live.gpu().clone();
            gpu.map_or(Ok(()), |gpu| gpu.synchronize())
        })?;
        self.make(py, Prepared::barrier(), async_op, None)
    }

    #[pyo3(signature = (*, async_op=false, stream=None))]
    fn group(slf: Py<Self>, async_op: bool, stream: Option<Stream>) -> Group {
        Group::new(slf, async_op, stream)
    }

    #[pyo3(signature = (color, key=None), text_signature = "($self, color, key=0)")]
    fn split(
        &self,
        py: Python<'_>,
        color: &Bound<'_, PyAny>,
        key: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Comm>> {
        let live = self.live(py, "split")?;
        // Taken as they are, so that a rank with a wrong one can notify the others, which wait for it.
        let key = key.map_or(Ok(0), |key| key.extract::<i32>());
        let (color, key) = match color.extract::<Option<u32>>().and_then(|color| Ok((color, key?))) {
            Ok(arguments) => arguments,
            Err(wrong) => {
                let why = format!("its arguments of split are wrong: {wrong}");
                waiting(py, "split", &self.names, || live.comm.refuse_split(&why))?;
                return Err(wrong);
            }
        };
        let comm = waiting(py, "split", &self.names, || live.comm.split(color, key))?;
        Ok(comm.map(|comm| Comm::new(comm, Names::default())))
    }

    /// The end of all that is in a stream of that GPU.
    fn mark(&self, py: Python<'_>, device: usize, stream: u64) -> PyResult<End> {
        let live = self.live(py, "mark")?;
        waiting(py, "mark", &self.names, || {
            let gpu = live.on(device)?;
            // SAFETY: the Python caller guarantees that the handle is a stream, as with `stream=` of every call.
            let event = unsafe { gpu.mark(stream) }?;
            Ok(End::new(event, &gpu, self.name, &self.names))
        })
    }

    /// Raises the communicator's failure or an error of the GPU, if there is one.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let live = self.live(py, "check")?;
        waiting(py, "check", &self.names, || {
            if let Some(error) = live.comm.failure() {
                return Err(error);
            }
            let gpu = live.gpu().clone();
            gpu.map_or(Ok(()), |gpu| gpu.check())
        })
    }

    fn has_left(&self, py: Python<'_>, rank: i64) -> PyResult<bool> {
        let rank = self.asker(py, "has_left").rank_of("rank", rank)?;
        let live = self.open(py, "has_left")?;
        Ok(py.detach(|| live.comm.has_left(rank)))
    }

    #[pyo3(signature = (reason="abort was called"))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let live = self.open(py, "abort")?;
        py.detach(|| live.abort(reason));
        Ok(())
    }

    fn close(&self, py: Python<'_>) {
        let live = take(&self.live);
        py.detach(|| drop(live));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, _type: &Any<'_>, _value: &Any<'_>, _traceback: &Any<'_>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<tinynccl.Comm: rank {} of {}>", self.rank, self.size)
    }
}
