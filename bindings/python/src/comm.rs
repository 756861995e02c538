//! `Comm`: a communicator of the library, and on first use one on the GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tinynccl::Ticket;
use tinynccl::bootstrap::UniqueId;
use tinynccl::wire::Collective;

use crate::calls::{Asker, Prepared};
use crate::errors::{Names, invalid, not_inside, raise, raise_plainly, waiting};
use crate::group::{Group, Open};
use crate::join::{config, joining};
use crate::live::{Live, Slot, take};
use crate::run::Made;
use crate::server::Server;
use crate::stream::{End, Stream};

pub(crate) type Any<'py> = Bound<'py, PyAny>;

/// One rank's membership in a group of ranks.
#[pyclass(frozen, weakref, module = "tinynccl._core")]
pub(crate) struct Comm {
    live: Arc<Slot>,
    group: Mutex<Open>,
    rank: usize,
    size: usize,
    local_rank: usize,
    /// Our rank's number in errors.
    pub(crate) name: usize,
    pub(crate) names: Names,
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

    pub(crate) fn asker<'py>(&self, py: Python<'py>, op: &'static str) -> Asker<'py> {
        Asker { py, op, rank: self.rank, name: self.name, size: self.size }
    }

    pub(crate) fn open_group(&self) -> MutexGuard<'_, Open> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
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
        // Who watches meets in torch's store.
        if watch.is_some() && world_size > 1 {
            config.check_key("torch's store, which sends ids in clear text,").map_err(|e| raise_plainly(py, &e))?;
        }
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

    #[staticmethod]
    #[pyo3(signature = (ticket, *, timeout=None, transport=None, cuda_blocks=None))]
    fn from_ticket(
        py: Python<'_>,
        ticket: &str,
        timeout: Option<f64>,
        transport: Option<&str>,
        cuda_blocks: Option<usize>,
    ) -> PyResult<Comm> {
        let config = config(py, timeout, transport, cuda_blocks)?;
        let ticket: Ticket = ticket.parse().map_err(|e| raise_plainly(py, &e))?;
        let names = Names::default();
        let comm = joining(py, &names, None, move || tinynccl::Comm::from_ticket(&ticket, config))?;
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

    /// Ends calls on every rank; also those in streams, here.
    fn revoke(&self, py: Python<'_>) -> PyResult<()> {
        let live = self.open(py, "revoke")?;
        py.detach(|| live.revoke()).map_err(|e| raise(py, &self.names, &e))
    }

    #[pyo3(signature = (value=u64::MAX), text_signature = "($self, value=2**64 - 1)")]
    fn agree(&self, py: Python<'_>, value: u64) -> PyResult<(u64, Vec<usize>)> {
        let live = self.live(py, "agree")?;
        let agreed = waiting(py, "agree", &self.names, || live.comm.agree(value))?;
        Ok((agreed.value, agreed.alive))
    }

    fn shrink(&self, py: Python<'_>) -> PyResult<Comm> {
        let live = self.live(py, "shrink")?;
        let comm = waiting(py, "shrink", &self.names, || live.comm.shrink())?;
        Ok(Comm::new(comm, Names::default()))
    }

    fn grow(&self, py: Python<'_>, size: usize) -> PyResult<Comm> {
        let live = self.live(py, "grow")?;
        let comm = waiting(py, "grow", &self.names, || live.comm.grow(size))?;
        Ok(Comm::new(comm, Names::default()))
    }

    fn ticket(&self, py: Python<'_>) -> PyResult<String> {
        let live = self.open(py, "ticket")?;
        live.comm.ticket().map(|ticket| ticket.to_string()).map_err(|e| raise(py, &self.names, &e))
    }

    #[getter]
    fn waiting(&self, py: Python<'_>) -> PyResult<usize> {
        let live = self.open(py, "waiting")?;
        Ok(py.detach(|| live.comm.waiting()))
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
