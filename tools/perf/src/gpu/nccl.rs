//! A task through NVIDIA's NCCL.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nccl::sys;
use tinynccl::wire::Collective;
use tinynccl::{Comm, DType};

use super::task::{Buffers, Task};

/// A communicator of NCCL.
#[derive(Debug)]
pub(super) struct Nccl {
    comm: sys::ncclComm_t,
    rank: usize,
    ranks: usize,
}

/// `NCCL_WIN_COLL_SYMMETRIC`.
const SYMMETRIC: i32 = 1;

/// Memory that NCCL allocated and registered.
#[derive(Debug)]
pub(super) struct Window {
    comm: sys::ncclComm_t,
    memory: *mut std::ffi::c_void,
    handle: sys::ncclWindow_t,
}

impl Window {
    pub(super) fn address(&self) -> u64 {
        self.memory as u64
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: both were made by NCCL; the stream was waited for.
        unsafe {
            if !self.handle.is_null() {
                let _ = sys::ncclCommWindowDeregister(self.comm, self.handle);
            }
            let _ = sys::ncclMemFree(self.memory);
        }
    }
}

fn done(what: &str, status: sys::ncclResult_t) -> Result<()> {
    match status {
        sys::ncclResult_t::ncclSuccess => Ok(()),
        other => bail!("NCCL: {what}: {other:?}"),
    }
}

impl Nccl {
    /// `None` when a rank finds no NCCL.
    pub(super) fn new(comm: &Comm, context: &Arc<CudaContext>) -> Result<Option<Nccl>> {
        // SAFETY: only tries to load the library.
        let mut found = [i32::from(unsafe { sys::is_culib_present() })];
        comm.all_reduce_in_place(&mut found, tinynccl::ReduceOp::Min)?;
        if found[0] == 0 {
            return Ok(None);
        }
        context.bind_to_thread()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        if comm.rank() == 0 {
            // SAFETY: writes the id.
            done("making an id", unsafe { sys::ncclGetUniqueId(&mut id) })?;
        }
        let mut bytes = id.internal.map(|c| c as u8);
        comm.broadcast_in_place(&mut bytes, 0)?;
        id.internal = bytes.map(|b| b as _);
        let mut handle = std::ptr::null_mut();
        // SAFETY: the id is rank 0's; every rank calls this.
        done("starting", unsafe { sys::ncclCommInitRank(&mut handle, comm.size() as i32, id, comm.rank() as i32) })?;
        Ok(Some(Nccl { comm: handle, rank: comm.rank(), ranks: comm.size() }))
    }

    pub(super) fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: writes the version.
        done("asking for its version", unsafe { sys::ncclGetVersion(&mut version) })?;
        Ok(format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100))
    }

    /// Memory of NCCL's own, registered as a symmetric window on all ranks, with the contents of `buffers`.
    pub(super) fn windows(&self, stream: &Arc<CudaStream>, task: &Task, buffers: &Buffers) -> Result<[Window; 2]> {
        let window = |from: u64| -> Result<Window> {
            let mut memory = std::ptr::null_mut();
            // SAFETY: writes the address.
            done("allocating", unsafe { sys::ncclMemAlloc(&mut memory, task.bytes) })?;
            let mut window = Window { comm: self.comm, memory, handle: std::ptr::null_mut() };
            // SAFETY: the memory is that long; every rank registers the same.
            let status =
                unsafe { sys::ncclCommWindowRegister(self.comm, memory, task.bytes, &mut window.handle, SYMMETRIC) };
            done("registering", status)?;
            // SAFETY: both are as long.
            unsafe {
                cudarc::driver::result::memcpy_dtod_async(window.address(), from, task.bytes, stream.cu_stream())
            }?;
            Ok(window)
        };
        let [input, output] = buffers.addresses;
        let windows = [window(input)?, window(output)?];
        stream.synchronize()?;
        Ok(windows)
    }

    /// The ranks that this one sends to, and that it receives from, in an operation that is a group of messages.
    fn messages(&self, collective: Collective) -> (Range<usize>, Range<usize>) {
        let (all, root, one) = (0..self.ranks, 0..1, |rank: usize| rank % self.ranks..rank % self.ranks + 1);
        let at_root = if self.rank == 0 { all.clone() } else { 0..0 };
        match collective {
            Collective::Gather => (root, at_root),
            Collective::Scatter => (at_root, root),
            Collective::SendRecv => (one(self.rank + 1), one(self.rank + self.ranks - 1)),
            _ => (all.clone(), all),
        }
    }

    pub(super) fn enqueue(&self, stream: &Arc<CudaStream>, task: &Task, [input, output]: [u64; 2]) -> Result<()> {
        let dtype = match task.dtype {
            DType::F32 => sys::ncclDataType_t::ncclFloat32,
            DType::Bf16 => sys::ncclDataType_t::ncclBfloat16,
            other => bail!("{other} is not compared with NCCL: expected f32 or bf16"),
        };
        let sum = sys::ncclRedOp_t::ncclSum;
        let (from, to, count, comm) = (input as *const _, output as *mut std::ffi::c_void, task.count, self.comm);
        let stream = stream.cu_stream().cast();
        // SAFETY: both buffers are as long as nccl-tests count; they live until the stream is waited for.
        let status = unsafe {
            match task.collective {
                Collective::AllReduce => sys::ncclAllReduce(from, to, count, dtype, sum, comm, stream),
                Collective::AllGather => sys::ncclAllGather(from, to, count, dtype, comm, stream),
                Collective::ReduceScatter => sys::ncclReduceScatter(from, to, count, dtype, sum, comm, stream),
                Collective::Broadcast => sys::ncclBroadcast(from, to, count, dtype, 0, comm, stream),
                Collective::Reduce => sys::ncclReduce(from, to, count, dtype, sum, 0, comm, stream),
                // NCCL 2.28's own gather and scatter are such groups; its older versions have none.
                _ => {
                    let (sends, receives) = self.messages(task.collective);
                    let segment = task.segment() as u64;
                    // A rank's segment lies at its number where there are several.
                    let at = |peers: &Range<usize>, peer| if peers.len() > 1 { segment * peer as u64 } else { 0 };
                    done("group", sys::ncclGroupStart())?;
                    for peer in sends.clone() {
                        let from = (input + at(&sends, peer)) as *const _;
                        done("send", sys::ncclSend(from, count, dtype, peer as i32, comm, stream))?;
                    }
                    for peer in receives.clone() {
                        let to = (output + at(&receives, peer)) as *mut _;
                        done("recv", sys::ncclRecv(to, count, dtype, peer as i32, comm, stream))?;
                    }
                    sys::ncclGroupEnd()
                }
            }
        };
        done("enqueueing", status)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: made by `new`; its streams were waited for.
        let _ = unsafe { sys::ncclCommDestroy(self.comm) };
    }
}
