//! A rank's communicator of NVIDIA's NCCL.
//!
//! Its unique id goes through our communicator, so neither MPI nor a file system is needed. Its communicators are
//! non-blocking: we poll their state with our deadline, and `ncclCommAbort` ends calls that exceed it.
//!
//! `avg` is NCCL's own, which this library defines alike (`reduce/average.rs`).

use std::ffi::c_int;
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};

use super::library::{self, CommConfig, IN_PROGRESS, SUCCESS, Status, StreamHandle};
use crate::process_group::backend::{Backend, BackendType, not_carried};
use crate::process_group::gpu;
use tinynccl_comm::RawCall;
use tinynccl_comm::executor::Supervisor;
use tinynccl_comm::trace::{By, Span, recorded};
use tinynccl_comm::{Comm, Inner, State};
use tinynccl_cuda::Messages;
use tinynccl_cuda::Stream;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;
use tinynccl_sys::threads::lock;

/// One rank's NCCL communicator.
struct Nccl {
    nccl: &'static library::Nccl,
    handle: Mutex<Handle>,
    /// Requests that the holder of the handle abort it.
    aborting: AtomicBool,
    failure: Mutex<Option<Error>>,
    context: Arc<CudaContext>,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// From the host's communicator, which learns when a rank dies.
    state: Arc<State>,
}

/// Null when it was aborted.
#[derive(Debug)]
struct Handle(ncclComm_t);

// SAFETY: NCCL's communicators may be used by any thread, one at a time.
unsafe impl Send for Handle {}

/// Makes our rank's part of a group; every rank of `comm` calls it.
pub(in crate::process_group) fn make(comm: &Comm, context: Arc<CudaContext>) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Nccl::new(comm, context)?))
}

impl Nccl {
    fn new(comm: &Comm, context: Arc<CudaContext>) -> Result<Nccl> {
        let nccl = library::open(comm.config())?;
        let (rank, size) = (comm.rank(), comm.size());
        let id = exchange_id(nccl, comm)?;
        gpu::bind("backend nccl", &context)?;
        let this = Nccl {
            nccl,
            handle: Mutex::new(Handle(null_mut())),
            aborting: AtomicBool::new(false),
            failure: Mutex::new(None),
            context,
            rank,
            size,
            timeout: comm.config().timeout.max(comm.config().connect_timeout),
            state: comm.inner().state_shared(),
        };
        {
            let mut handle = lock(&this.handle);
            let mut config = CommConfig::non_blocking();
            let (ranks, number) = (size as c_int, rank as c_int);
            // SAFETY: all are what the function wants; every rank of `comm` calls it.
            let status = unsafe { (nccl.api.init)(&mut handle.0, ranks, id, number, &mut config) };
            this.settle(&mut handle, "init", status)?;
        }
        Ok(this)
    }

    /// Waits until the communicator has accepted the last calls; a failure is final.
    fn settle(&self, handle: &mut Handle, op: &str, status: Status) -> Result<()> {
        let start = Instant::now();
        let mut state = status;
        let mut turns = 0u32;
        while state == IN_PROGRESS || turns == 0 && state == SUCCESS && !handle.0.is_null() {
            // SAFETY: the handle is one that NCCL gave us.
            let asked = unsafe { (self.nccl.api.state)(handle.0, &mut state) };
            if asked != SUCCESS {
                state = asked;
            }
            turns += 1;
            if state != IN_PROGRESS {
                break;
            }
            if self.aborting.load(Ordering::Acquire) {
                return Err(self.fail(handle, self.aborted(op)));
            }
            if turns.is_multiple_of(64) {
                if let Some(error) = self.state.failure() {
                    return Err(self.fail(handle, error));
                }
                let waited = start.elapsed();
                if waited >= self.timeout {
                    return Err(self.fail(handle, self.timed_out(op, waited)));
                }
                std::thread::yield_now();
            }
        }
        match state {
            SUCCESS => Ok(()),
            failed => {
                let status = self.nccl.words(failed, handle.0);
                let detail = format!("rank {} of {}, GPU {}", self.rank, self.size, self.context.ordinal());
                Err(self.fail(handle, Error::Cuda { op: format!("{op} by backend nccl"), detail, status }))
            }
        }
    }

    /// Aborts NCCL's communicator and keeps the first failure.
    fn fail(&self, handle: &mut Handle, error: Error) -> Error {
        let error = lock(&self.failure).get_or_insert(error).clone();
        if !handle.0.is_null() {
            // SAFETY: the handle is NCCL's; afterwards it is gone.
            let status = unsafe { (self.nccl.api.abort)(handle.0) };
            if status != SUCCESS && status != IN_PROGRESS {
                log::debug!("rank {}: ncclCommAbort: {}", self.rank, self.nccl.words(status, null_mut()));
            }
            handle.0 = null_mut();
        }
        error
    }

    fn timed_out(&self, op: &str, waited: Duration) -> Error {
        Error::Timeout {
            op: format!("{op} by backend nccl"),
            rank: self.rank,
            waited,
            missing: Vec::new(),
            detail: "NCCL does not say whom it waits for: has every rank made the same call, with the same length and \
                     type? Backend tinynccl names the ranks that differ"
                .to_owned(),
        }
    }

    fn aborted(&self, op: &str) -> Error {
        Error::Aborted { op: op.to_owned(), rank: self.rank, reason: "abort was called on the group".to_owned() }
    }

    /// The first failure, as text for a later call.
    fn failed_before(&self, op: &str) -> Result<()> {
        match &*lock(&self.failure) {
            None => Ok(()),
            Some(first) => Err(first.for_later_call(op.to_owned(), self.rank)),
        }
    }

    /// Puts calls into a stream, as one.
    ///
    /// # Safety
    /// As [`Backend::enqueue`].
    unsafe fn put(&self, calls: &[RawCall], stream: &Stream) -> Result<()> {
        let op = match calls {
            [one] => one.collective.name(),
            _ => "batch",
        };
        self.failed_before(op)?;
        if calls.is_empty() {
            return Ok(());
        }
        calls.iter().try_for_each(combined)?;
        gpu::bind(op, &self.context)?;
        let mut handle = lock(&self.handle);
        if handle.0.is_null() {
            drop(handle);
            self.failed_before(op)?;
            return Err(self.aborted(op));
        }
        let to: StreamHandle = stream.handle().cast();
        // SAFETY: groups are per thread; ours ends below in every case.
        let started = unsafe { (self.nccl.api.group_start)() };
        let mut status = started;
        if started == SUCCESS {
            for call in calls {
                // SAFETY: forwarded from the caller.
                let issued = unsafe { self.issue(handle.0, call, to) };
                if issued != SUCCESS && issued != IN_PROGRESS {
                    status = issued;
                    break;
                }
            }
            // SAFETY: see above.
            let ended = unsafe { (self.nccl.api.group_end)() };
            if status == SUCCESS {
                status = ended;
            }
        }
        self.settle(&mut handle, op, status)
    }

    /// Issues one call inside a group.
    ///
    /// # Safety
    /// As [`Backend::enqueue`].
    unsafe fn issue(&self, comm: ncclComm_t, call: &RawCall, stream: StreamHandle) -> Status {
        let api = &self.nccl.api;
        let (input, output) = (call.buffers.input.cast(), call.buffers.output.cast());
        let (count, dtype, op) = names(call);
        let root = call.root as c_int;
        // SAFETY: forwarded from the caller; lengths were checked when the call was made.
        unsafe {
            match call.collective {
                Collective::AllReduce => (api.all_reduce)(input, output, count, dtype, op, comm, stream),
                Collective::Broadcast => (api.broadcast)(input, output, count, dtype, root, comm, stream),
                Collective::Reduce => (api.reduce)(input, output, count, dtype, op, root, comm, stream),
                Collective::AllGather => (api.all_gather)(input, output, count, dtype, comm, stream),
                Collective::ReduceScatter => (api.reduce_scatter)(input, output, count, dtype, op, comm, stream),
                _ => {
                    let mut messages = Messages::default();
                    // NCCL copies a message of a rank to itself.
                    messages.add(call, self.rank, self.size);
                    let bytes = ncclDataType_t::ncclUint8;
                    let sends = messages.sends.iter().map(|m| {
                        (api.send)(m.address.cast_const().cast(), m.bytes, bytes, m.peer as c_int, comm, stream)
                    });
                    let recvs = messages
                        .recvs
                        .iter()
                        .map(|m| (api.recv)(m.address.cast(), m.bytes, bytes, m.peer as c_int, comm, stream));
                    sends.chain(recvs).find(|&s| s != SUCCESS && s != IN_PROGRESS).unwrap_or(SUCCESS)
                }
            }
        }
    }
}

/// Rank 0 makes the id; if it fails, all ranks return the reason.
fn exchange_id(nccl: &library::Nccl, comm: &Comm) -> Result<ncclUniqueId> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    let ours: std::result::Result<Vec<u8>, String> = match comm.rank() {
        0 => {
            // SAFETY: it fills the id.
            let status = unsafe { (nccl.api.unique_id)(&mut id) };
            match status {
                SUCCESS => Ok(id.internal.iter().map(|&c| c.cast_unsigned()).collect()),
                failed => Err(nccl.words(failed, null_mut())),
            }
        }
        _ => Ok(Vec::new()),
    };
    let all: Vec<std::result::Result<Vec<u8>, String>> = comm.exchange("backend nccl: its id", &ours)?;
    let failed = |status: String| Error::Cuda {
        op: "init by backend nccl".to_owned(),
        detail: "rank 0 makes NCCL's unique id".to_owned(),
        status,
    };
    match all.into_iter().next() {
        Some(Ok(bytes)) if bytes.len() == id.internal.len() => {
            for (to, byte) in id.internal.iter_mut().zip(bytes) {
                *to = byte.cast_signed();
            }
            Ok(id)
        }
        Some(Err(status)) => Err(failed(status)),
        _ => Err(failed("its length is wrong".to_owned())),
    }
}

/// NCCL's count, type and operator of a call. Data that is only moved goes as bytes, so it may be of any type. Types
/// and operators that NCCL cannot combine were refused before.
fn names(call: &RawCall) -> (usize, ncclDataType_t, ncclRedOp_t) {
    let key = &call.call;
    match (key.op, data_type(key.dtype)) {
        (Some(op), Some(dtype)) => (key.count, dtype, operator(op).unwrap_or(ncclRedOp_t::ncclSum)),
        _ => (key.count * key.dtype.size(), ncclDataType_t::ncclUint8, ncclRedOp_t::ncclSum),
    }
}

/// An error if NCCL cannot combine this type, or not by this operator.
fn combined(call: &RawCall) -> Result<()> {
    let Some(op) = call.op else { return Ok(()) };
    let dtype = call.dtype;
    if data_type(dtype).is_some() && operator(op).is_some() {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{} of {dtype}, {op}, by backend nccl", call.collective),
        detail: "NCCL has neither 16-bit integers nor operators on bits: ask for backend tinynccl, which has both"
            .to_owned(),
    })
}

/// `None`: NCCL has no such type.
fn data_type(dtype: DType) -> Option<ncclDataType_t> {
    Some(match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::I8 => ncclDataType_t::ncclInt8,
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::U64 => ncclDataType_t::ncclUint64,
        DType::F8E4M3 => ncclDataType_t::ncclFloat8e4m3,
        DType::F8E5M2 => ncclDataType_t::ncclFloat8e5m2,
        DType::I16 | DType::U16 => return None,
    })
}

/// `None`: NCCL has no such operator.
fn operator(op: ReduceOp) -> Option<ncclRedOp_t> {
    Some(match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Prod => ncclRedOp_t::ncclProd,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return None,
    })
}

/// Returns true if NCCL has the collective, or if it is composed of messages.
fn has_form(collective: Collective) -> bool {
    match collective {
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather
        | Collective::Scatter
        | Collective::AllToAll
        | Collective::SendRecv => true,
        Collective::Barrier | Collective::Scan => false,
    }
}

const HOST: &str = "copy it to the GPU, or ask for backend tinynccl, which carries both";

impl Backend for Nccl {
    fn kind(&self) -> BackendType {
        BackendType::Nccl
    }

    /// Barriers use the host's communicator: NCCL has none.
    unsafe fn run(&self, comm: &Inner, call: &RawCall, background: bool) -> Result<()> {
        match call.collective {
            // SAFETY: forwarded from the caller.
            Collective::Barrier => unsafe { comm.execute(call, background) },
            other => Err(not_carried(BackendType::Nccl, other, "host memory", HOST)),
        }
    }

    unsafe fn run_batch(&self, _comm: &Inner, calls: &[RawCall]) -> Result<()> {
        match calls.first() {
            None => Ok(()),
            Some(call) => Err(not_carried(BackendType::Nccl, call.collective, "host memory", HOST)),
        }
    }

    unsafe fn enqueue(&self, calls: &[RawCall], stream: &Stream) -> Result<()> {
        if let Some(call) = calls.iter().find(|call| !has_form(call.collective)) {
            let instead = "ask for backend tinynccl, which has it";
            return Err(not_carried(BackendType::Nccl, call.collective, "device memory", instead));
        }
        let span = || Span::Carried {
            collective: calls.first().map_or(Collective::Barrier, |call| call.collective) as u8,
            calls: calls.len() as u32,
            bytes: calls.iter().map(|call| (call.count * call.dtype.size()) as u64).sum(),
            by: By::Nccl,
        };
        // SAFETY: forwarded from the caller.
        recorded(self.state.trace.as_deref(), span, || unsafe { self.put(calls, stream) })
    }

    fn device(&self) -> Option<&Arc<CudaContext>> {
        Some(&self.context)
    }

    fn check(&self) -> Result<()> {
        if let Some(error) = &*lock(&self.failure) {
            return Err(error.clone());
        }
        let mut handle = match self.handle.try_lock() {
            Ok(handle) => handle,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // In use: the thread that uses it sees the failure.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        if self.aborting.load(Ordering::Acquire) {
            return Err(self.fail(&mut handle, self.aborted("check")));
        }
        if let Some(error) = self.state.failure() {
            return Err(self.fail(&mut handle, error));
        }
        if handle.0.is_null() {
            return Ok(());
        }
        let mut state = SUCCESS;
        // SAFETY: the handle is one that NCCL gave us.
        let asked = unsafe { (self.nccl.api.state)(handle.0, &mut state) };
        match if asked == SUCCESS { state } else { asked } {
            SUCCESS | IN_PROGRESS => Ok(()),
            failed => {
                let status = self.nccl.words(failed, handle.0);
                let detail = format!("rank {} of {}, GPU {}", self.rank, self.size, self.context.ordinal());
                Err(self.fail(&mut handle, Error::Cuda { op: "backend nccl".to_owned(), detail, status }))
            }
        }
    }

    fn overdue(&self, op: &str, waited: Duration) -> Error {
        let error = self.timed_out(op, waited);
        self.fail(&mut lock(&self.handle), error)
    }

    fn abort(&self, _reason: &str) {
        self.aborting.store(true, Ordering::Release);
        if let Ok(mut handle) = self.handle.try_lock() {
            let error = self.aborted("abort");
            self.fail(&mut handle, error);
        }
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {} of {}, GPU {})", self.nccl.description, self.rank, self.size, self.context.ordinal())
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if !self.state.origin.is_here() {
            return;
        }
        let mut handle = lock(&self.handle);
        if handle.0.is_null() {
            return;
        }
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // SAFETY: the handle is NCCL's and used for the last time. Finalizing waits for the calls in the streams.
        let status = unsafe { (self.nccl.api.finalize)(handle.0) };
        if let Err(error) = self.settle(&mut handle, "close", status) {
            log::debug!("rank {} leaves NCCL after: {error}", self.rank);
            return;
        }
        // SAFETY: see above.
        let status = unsafe { (self.nccl.api.destroy)(handle.0) };
        if status != SUCCESS {
            log::debug!("rank {}: ncclCommDestroy: {}", self.rank, self.nccl.words(status, null_mut()));
        }
    }
}
