//! `Comm`: a communicator of the library, and on first use one on the GPU.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pyo3::prelude::*;
use tinynccl::bootstrap::UniqueId;
use tinynccl::wire::Collective;
use tinynccl::{Config, Error, Result};

use crate::calls::{Asker, Prepared, operator};
use crate::device::Gpu;
use crate::errors::{invalid, raise, waiting};
use crate::group::{Group, Open};
use crate::memory::Device;
use crate::torch::current_stream;
use crate::work::{Shared, Work};

type Any<'py> = Bound<'py, PyAny>;

/// What a communicator consists of, in the order in which it ends.
pub(crate) struct Live {
    gpu: Mutex<Option<Arc<Gpu>>>,
    comm: tinynccl::Comm,
    _server: Option<tinynccl::bootstrap::Server>,
}

impl Live {
    fn gpu(&self) -> MutexGuard<'_, Option<Arc<Gpu>>> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator on a GPU, made by the first call that needs it.
    fn on(&self, ordinal: usize) -> Result<Arc<Gpu>> {
        let mut gpu = self.gpu();
        match &*gpu {
            Some(gpu) if gpu.ordinal() == ordinal => Ok(gpu.clone()),
            Some(gpu) => Err(Error::invalid(
                "device",
                format!(
                    "rank {}: the tensor is on cuda:{ordinal}, this communicator was first used on cuda:{}: a communicator has one \
                     GPU per rank",
                    self.comm.rank(),
                    gpu.ordinal()
                ),
            )),
            None => Ok(gpu.insert(Arc::new(Gpu::new(&self.comm, ordinal)?)).clone()),
        }
    }

    pub(crate) fn abort(&self, reason: &str) {
        self.comm.abort(reason);
        // Not while another thread is making it; that one fails with the communicator.
        if let Ok(gpu) = self.gpu.try_lock()
            && let Some(gpu) = &*gpu
        {
            gpu.abort();
        }
    }
}

/// A communicator until it is closed.
type Slot = Mutex<Option<Arc<Live>>>;

/// Those of this process that may still be open.
static OPEN: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

fn take(slot: &Slot) -> Option<Arc<Live>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// At the end of the interpreter: leaves all communicators. Nobody will wait for what is in flight.
#[pyfunction]
pub(crate) fn _leave_all(py: Python<'_>) {
    let slots = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    py.detach(|| {
        // The last made first: what was split or made for pairs of ranks goes before what it was made from.
        for live in slots.iter().rev().filter_map(Weak::upgrade).filter_map(|slot| take(&slot)) {
            if !live.comm.is_idle() {
                live.abort("the interpreter exits with calls in flight");
            }
        }
    });
}

/// One rank's membership in a group of ranks.
#[pyclass(frozen, weakref, module = "tinynccl._core")]
pub(crate) struct Comm {
    live: Arc<Slot>,
    group: Mutex<Open>,
    rank: usize,
    size: usize,
    local_rank: usize,
}

impl Drop for Comm {
    fn drop(&mut self) {
        let live = take(&self.live);
        // Leaving waits for calls in flight, whose end may need the interpreter.
        if let Some(live) = live {
            let mut live = Some(live);
            let _ = Python::try_attach(|py| py.detach(|| drop(live.take())));
        }
    }
}

impl Comm {
    fn new(comm: tinynccl::Comm, server: Option<tinynccl::bootstrap::Server>) -> Comm {
        let (rank, size, local_rank) = (comm.rank(), comm.size(), comm.local_rank());
        let live = Live { gpu: Mutex::new(None), comm, _server: server };
        let live: Arc<Slot> = Arc::new(Mutex::new(Some(Arc::new(live))));
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|slot| slot.strong_count() > 0);
        open.push(Arc::downgrade(&live));
        drop(open);
        Comm { live, group: Mutex::new(None), rank, size, local_rank }
    }

    fn live(&self, py: Python<'_>, op: &'static str) -> PyResult<Arc<Live>> {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.clone().ok_or_else(|| invalid(py, op, format!("rank {}: the communicator is closed", self.rank)))
    }

    fn asker<'py>(&self, py: Python<'py>, op: &'static str) -> Asker<'py> {
        Asker { py, op, rank: self.rank, size: self.size }
    }

    pub(crate) fn open_group(&self) -> MutexGuard<'_, Open> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call to the open group of this thread, or runs it.
    fn make(&self, py: Python<'_>, call: Prepared, async_op: bool, stream: Option<u64>) -> PyResult<Option<Work>> {
        if let Some((thread, calls)) = &mut *self.open_group()
            && *thread == std::thread::current().id()
        {
            if async_op {
                let detail = "async_op inside of a group: give it to the group, comm.group(async_op=True)".to_owned();
                return Err(invalid(py, call.name(), detail));
            }
            calls.push(call);
            return Ok(None);
        }
        self.run(py, vec![call], async_op, stream)
    }

    pub(crate) fn run(
        &self,
        py: Python<'_>,
        calls: Vec<Prepared>,
        async_op: bool,
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
        let name = if let [one] = calls.as_slice() { one.name() } else { "group" };
        let live = self.live(py, name)?;
        let device = calls.first().map_or(Device::Host, |call| call.device);
        if let Some(other) = calls.iter().find(|call| call.device != device) {
            let detail = format!(
                "rank {}: {} is on {device}, {} on {}: the calls of a group must be on one device",
                self.rank,
                calls[0].name(),
                other.name(),
                other.device
            );
            return Err(invalid(py, "group", detail));
        }
        match device {
            Device::Host => self.run_on_host(py, &live, name, calls, async_op),
            Device::Cuda(ordinal) => {
                let named = stream.or_else(|| calls.iter().find_map(|call| call.stream));
                let stream = named.map_or_else(|| current_stream(py, ordinal), Ok)?;
                // SAFETY: lengths were checked against the memory, which is kept by its object. That the object lives until the
                // stream has run the call is the caller's part, as with every call that only enqueues.
                waiting(py, || unsafe { live.on(ordinal)?.enqueue(&calls, stream) })?;
                Ok(async_op.then(|| {
                    let shared = Shared::new(calls.into_iter().flat_map(|call| call.keep).collect());
                    shared.complete(Ok(()));
                    Work::new(shared, &live, name, self.rank)
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
    ) -> PyResult<Option<Work>> {
        // Behind calls in flight a blocking one waits in slices, too.
        if async_op || !live.comm.is_idle() {
            let raw = calls.iter().map(Prepared::raw).collect();
            let shared = Shared::new(calls.into_iter().flat_map(|call| call.keep).collect());
            let completed = shared.clone();
            let done = move |result| completed.complete(result);
            // SAFETY: lengths were checked against the memory; `shared` keeps it, and the job keeps `shared`.
            unsafe { live.comm.enqueue_raw(raw, done) }.map_err(|e| raise(py, &e))?;
            let work = Work::new(shared, live, name, self.rank);
            if async_op {
                return Ok(Some(work));
            }
            return work.finish(py, None).map(|()| None);
        }
        if let [one] = calls.as_slice() {
            let raw = [one.raw()];
            // SAFETY: lengths were checked against the memory; `calls` keeps it until this has returned.
            return waiting(py, || unsafe { live.comm.run_raw(&raw) }).map(|()| None);
        }
        let raw: Vec<_> = calls.iter().map(Prepared::raw).collect();
        // SAFETY: as above.
        waiting(py, || unsafe { live.comm.run_raw(&raw) }).map(|()| None)
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
        let asker = self.asker(py, collective.name());
        let root = asker.rank_of("root", root)?;
        let op = op.map(|name| operator(&asker, name)).transpose()?;
        let call = asker.even(collective, op, root, input, output)?;
        self.make(py, call, async_op, stream)
    }
}

/// Settings of the environment, with what the caller gave.
fn config(py: Python<'_>, timeout: Option<f64>, transport: Option<&str>) -> PyResult<Config> {
    let mut config = Config::from_env().map_err(|e| raise(py, &e))?;
    if let Some(seconds) = timeout {
        config.timeout = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero()).ok_or_else(|| {
            invalid(py, "timeout", format!("{seconds} seconds, expected a positive, finite number of seconds"))
        })?;
        config.connect_timeout = config.connect_timeout.min(config.timeout);
    }
    if let Some(transport) = transport {
        config.transport = transport.parse().map_err(|e: String| invalid(py, "transport", e))?;
    }
    Ok(config)
}

/// Waits for a thread of its own, so that a signal ends the wait; the thread ends at its own deadline.
fn joining(py: Python<'_>, join: impl FnOnce() -> Result<tinynccl::Comm> + Send + 'static) -> PyResult<tinynccl::Comm> {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver);
    std::thread::Builder::new()
        .name("tinynccl-join".to_owned())
        .spawn(move || sender.send(join()))
        .map_err(|e| raise(py, &Error::io("Comm", "starting a thread", &e)))?;
    loop {
        match py
            .detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(Duration::from_millis(50)))
        {
            Ok(outcome) => return outcome.map_err(|e| raise(py, &e)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(invalid(py, "Comm", "the thread that joined the ranks ended early".to_owned()));
            }
        }
    }
}

#[pymethods]
impl Comm {
    #[new]
    #[pyo3(signature = (unique_id, rank, world_size, *, timeout=None, transport=None, server=None))]
    fn py_new(
        py: Python<'_>,
        unique_id: &str,
        rank: usize,
        world_size: usize,
        timeout: Option<f64>,
        transport: Option<&str>,
        server: Option<&Server>,
    ) -> PyResult<Comm> {
        let config = config(py, timeout, transport)?;
        let id: UniqueId = unique_id.parse().map_err(|e| raise(py, &e))?;
        let comm = joining(py, move || tinynccl::Comm::init(&id, rank, world_size, config))?;
        Ok(Comm::new(comm, server.and_then(Server::take)))
    }

    #[staticmethod]
    #[pyo3(signature = (*, timeout=None, transport=None))]
    fn from_env(py: Python<'_>, timeout: Option<f64>, transport: Option<&str>) -> PyResult<Comm> {
        let config = config(py, timeout, transport)?;
        Ok(Comm::new(joining(py, move || tinynccl::Comm::from_env_with(config))?, None))
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
        Ok(self.live(py, "timeout")?.comm.config().timeout.as_secs_f64())
    }

    #[pyo3(signature = (input, output=None, op="sum", *, async_op=false, stream=None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        input: &Any<'_>,
        output: Option<&Any<'_>>,
        op: &str,
        async_op: bool,
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
        self.even(py, Collective::AllReduce, Some(op), 0, Some(input), output, async_op, stream)
    }

    #[pyo3(signature = (buffer, root=0, *, async_op=false, stream=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        buffer: &Any<'_>,
        root: i64,
        async_op: bool,
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
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
        stream: Option<u64>,
    ) -> PyResult<Option<Work>> {
        let call = self.asker(py, "recv").message(data, peer, false)?;
        self.make(py, call, async_op, stream)
    }

    #[pyo3(signature = (*, async_op=false))]
    fn barrier(&self, py: Python<'_>, async_op: bool) -> PyResult<Option<Work>> {
        let live = self.live(py, "barrier")?;
        let gpu = live.gpu().clone();
        if let Some(gpu) = gpu {
            waiting(py, || gpu.synchronize())?;
        }
        self.make(py, Prepared::barrier(), async_op, None)
    }

    #[pyo3(signature = (*, async_op=false, stream=None))]
    fn group(slf: Py<Self>, async_op: bool, stream: Option<u64>) -> Group {
        Group::new(slf, async_op, stream)
    }

    #[pyo3(signature = (color, key=0))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: i32) -> PyResult<Option<Comm>> {
        let live = self.live(py, "split")?;
        let comm = waiting(py, || live.comm.split(color, key))?;
        Ok(comm.map(|comm| Comm::new(comm, None)))
    }

    /// Raises what has failed on the GPU, if anything has.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let live = self.live(py, "check")?;
        let gpu = live.gpu().clone();
        gpu.map_or(Ok(()), |gpu| gpu.check().map_err(|e| raise(py, &e)))
    }

    #[pyo3(signature = (reason="abort was called"))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let live = self.live(py, "abort")?;
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

/// The rendezvous of a job.
#[pyclass(frozen, module = "tinynccl._core")]
pub(crate) struct Server {
    server: Mutex<Option<tinynccl::bootstrap::Server>>,
    id: String,
}

impl Server {
    fn take(&self) -> Option<tinynccl::bootstrap::Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (world_size, port=0))]
    fn py_new(py: Python<'_>, world_size: usize, port: u16) -> PyResult<Server> {
        let config = config(py, None, None)?;
        let bind = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let start = || {
            let token = UniqueId::random_token()?;
            tinynccl::bootstrap::Server::start(bind, token, world_size, &config)
        };
        let server = start().map_err(|e| raise(py, &e))?;
        Ok(Server { id: server.unique_id().to_string(), server: Mutex::new(Some(server)) })
    }

    #[getter]
    fn unique_id(&self) -> &str {
        &self.id
    }

    fn close(&self, py: Python<'_>) {
        let server = self.take();
        py.detach(|| drop(server));
    }
}

/// How many GPUs CUDA sees; 0 without CUDA.
#[pyfunction]
pub(crate) fn cuda_device_count() -> usize {
    tinynccl::cuda::device_count().unwrap_or(0)
}
