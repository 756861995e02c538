//! A GPU's memory, through the CUDA driver API (the crate cudarc, which opens libcuda at run time).

use std::any::Any;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice, result, sys};

use super::Buffer;
use crate::pinned::Pinned;
use crate::probe::{Export, Memory};
use crate::why::Why;

pub mod context;

use context::{Context, words};

/// The GPU maps memory in blocks of this size. An allocation of whole blocks shares none with another, so a
/// registration covers it alone. It also begins at a page, as a dmabuf must.
const BLOCK: usize = 2 << 20;

/// Waits for all work in the current context. The driver's "synchronous" memset and copy from pageable memory may
/// return while the GPU is still working, and our stream does not wait for them.
fn finish_all() -> Result<()> {
    result::ctx::synchronize().map_err(|e| anyhow!(words("cuCtxSynchronize", e)))
}

/// GPU memory, freed when its last user, the buffer or a registration, is gone.
#[derive(Debug)]
struct Allocation {
    context: Arc<Context>,
    pointer: sys::CUdeviceptr,
    size: usize,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by us, freed once; after a failure it stays allocated until the process ends.
            let _ = unsafe { result::free_sync(self.pointer) };
        }
    }
}

/// Pinned memory from the driver: copies to and from it run asynchronously.
#[derive(Debug)]
struct PinnedAllocation(PinnedHostSlice<u8>);

impl Drop for PinnedAllocation {
    fn drop(&mut self) {
        // A copy that an error left under way must not write to freed memory.
        let _ = self.0.context().synchronize();
    }
}

/// A stream and one event per slot: copies run in order, and a caller can wait for each.
#[derive(Debug)]
struct Copies {
    stream: Arc<CudaStream>,
    events: Vec<CudaEvent>,
}

/// A buffer in a GPU's memory.
#[derive(Debug)]
pub struct CudaBuffer {
    /// Dropped before the memory that they use.
    copies: Copies,
    memory: Arc<Allocation>,
    len: usize,
}

impl CudaBuffer {
    /// `len` bytes, zeroed, with room for `slots` copies at a time.
    pub fn new(context: &Arc<Context>, len: usize, slots: usize) -> Result<CudaBuffer> {
        ensure!(len > 0, "a buffer of 0 bytes");
        context.bind()?;
        let size = len.checked_next_multiple_of(BLOCK).context("size of the buffer")?;
        // SAFETY: zeroed below, before anybody reads it.
        let pointer = unsafe { result::malloc_sync(size) }
            .map_err(|e| anyhow!("GPU {}: {size} bytes: {}", context.index, words("cuMemAlloc", e)))?;
        let memory = Arc::new(Allocation { context: Arc::clone(context), pointer, size });
        // SAFETY: just allocated with this size.
        unsafe { result::memset_d8_sync(pointer, 0, size) }.map_err(|e| anyhow!(words("cuMemsetD8", e)))?;
        finish_all()?;
        let stream = context.context.new_stream().map_err(|e| anyhow!(words("cuStreamCreate", e)))?;
        let event = |_| context.context.new_event(None).map_err(|e| anyhow!(words("cuEventCreate", e)));
        let events = (0..slots).map(event).collect::<Result<_>>()?;
        Ok(CudaBuffer { copies: Copies { stream, events }, memory, len })
    }

    fn at(&self, range: Range<usize>) -> Result<sys::CUdeviceptr> {
        ensure!(range.start <= range.end && range.end <= self.len, "bytes {range:?} of a buffer of {}", self.len);
        self.memory.context.bind()?;
        Ok(self.memory.pointer + range.start as u64)
    }

    fn event(&self, slot: usize) -> Result<&CudaEvent> {
        self.copies.events.get(slot).with_context(|| format!("slot {slot} of {}", self.copies.events.len()))
    }

    fn record(&self, slot: usize) -> Result<()> {
        self.event(slot)?.record(&self.copies.stream).map_err(|e| anyhow!(words("cuEventRecord", e)))
    }

    /// NVIDIA's manual requires this before an RDMA device gets the memory: synchronous copies then return only after
    /// they are complete on the GPU too.
    fn order_copies(&self) -> Result<(), DriverError> {
        let on: u32 = 1;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        // SAFETY: this attribute takes an `unsigned int`, and the pointer is an allocation of ours.
        unsafe { sys::cuPointerSetAttribute((&raw const on).cast(), attribute, self.memory.pointer) }.result()
    }
}

impl Memory for CudaBuffer {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.memory.pointer
    }

    fn export(&self) -> Result<Export, Why> {
        let context = &self.memory.context;
        let source = format!("GPU {} (cuMemGetHandleForAddressRange)", context.index);
        if !context.dmabuf {
            return Err(Why::new(
                format!("GPU {}: the driver says DMA_BUF_SUPPORTED = 0", context.index),
                "NVIDIA's open kernel modules (version 515 or later), Linux 5.12 or later, a GPU of Turing or later",
            ));
        }
        let failed = |call: &str, e| Why::new(words(call, e), "the kernel's log (dmesg) says more");
        context.bind().map_err(|e| Why::new(format!("{e:#}"), "see above"))?;
        self.order_copies().map_err(|e| failed("cuPointerSetAttribute(SYNC_MEMOPS)", e))?;
        let mut fd: i32 = -1;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: for this kind of handle the driver writes an `int`; the range is one allocation of ours, in whole
        // pages.
        unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), self.memory.pointer, self.memory.size, kind, 0)
        }
        .result()
        .map_err(|e| failed("cuMemGetHandleForAddressRange", e))?;
        // SAFETY: a new descriptor from the call, ours alone.
        Ok(Export { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset: 0, source })
    }

    fn device_pointer(&self) -> Result<u64, Why> {
        self.memory.context.bind().map_err(|e| Why::new(format!("{e:#}"), "see above"))?;
        self.order_copies().map_err(|e| {
            Why::new(words("cuPointerSetAttribute(SYNC_MEMOPS)", e), "memory by cuMemAlloc, not managed memory")
        })?;
        Ok(self.memory.pointer)
    }

    fn gpudirect(&self) -> Result<(), Why> {
        let context = &self.memory.context;
        if context.gpudirect {
            return Ok(());
        }
        Err(Why::new(
            format!("GPU {}: the driver says GPU_DIRECT_RDMA_SUPPORTED = 0", context.index),
            "a data-center or professional GPU; GeForce cards have no GPUDirect RDMA",
        ))
    }

    fn pinned(&self, len: usize) -> Result<Pinned> {
        // Not write-combined: the CPU reads it.
        // SAFETY: zeroed below, before anybody reads it.
        let slice = unsafe { self.memory.context.context.alloc_pinned_with_flags(len, sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|e| anyhow!("{len} bytes of pinned memory: {}", words("cuMemHostAlloc", e)))?;
        let mut owner = PinnedAllocation(slice);
        let start = owner.0.as_mut_ptr().map_err(|e| anyhow!(words("cuEventSynchronize", e)))?;
        let start = NonNull::new(start).context("cuMemHostAlloc: address 0")?;
        // SAFETY: `len` bytes that no one else knows yet.
        unsafe { start.write_bytes(0, len) };
        // SAFETY: `len` initialized bytes that live as long as their owner.
        Ok(unsafe { Pinned::new(start, len, "pinned host memory (cuMemHostAlloc)", Box::new(owner)) })
    }

    fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.memory.clone()
    }
}

impl Buffer for CudaBuffer {
    fn describe(&self) -> String {
        let Context { index, name, dmabuf, gpudirect, .. } = &*self.memory.context;
        let (dmabuf, gpudirect) = (u8::from(*dmabuf), u8::from(*gpudirect));
        format!(
            "{} bytes on GPU {index} ({name}; DMA_BUF_SUPPORTED = {dmabuf}, GPU_DIRECT_RDMA_SUPPORTED = {gpudirect})",
            self.len
        )
    }

    fn start_out(&self, range: Range<usize>, staging: &Pinned, at: usize, slot: usize) -> Result<()> {
        let (from, to) = (self.at(range.clone())?, staging.at(at..at + range.len())?);
        // SAFETY: both ranges are inside their memory. The staging slot is untouched until `finish`, and outlives the
        // copy (`PinnedAllocation::drop`).
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, range.len(), self.copies.stream.cu_stream()) }
            .result()
            .map_err(|e| anyhow!(words("cuMemcpyDtoHAsync", e)))?;
        self.record(slot)
    }

    fn start_in(&self, range: Range<usize>, staging: &Pinned, at: usize, slot: usize) -> Result<()> {
        let (to, from) = (self.at(range.clone())?, staging.at(at..at + range.len())?);
        // SAFETY: as in `start_out`.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), range.len(), self.copies.stream.cu_stream()) }
            .result()
            .map_err(|e| anyhow!(words("cuMemcpyHtoDAsync", e)))?;
        self.record(slot)
    }

    /// Polls, because `cuEventSynchronize` has no deadline.
    fn finish(&self, slot: usize, deadline: Instant) -> Result<()> {
        let event = self.event(slot)?;
        self.memory.context.bind()?;
        loop {
            match event.try_is_complete() {
                Ok(true) => return Ok(()),
                Ok(false) if Instant::now() < deadline => std::thread::yield_now(),
                Ok(false) => {
                    bail!("a copy between GPU {} and the CPU takes longer than --timeout", self.memory.context.index)
                }
                Err(e) => bail!(words("a copy between GPU and CPU", e)),
            }
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let to = self.at(offset..offset.checked_add(bytes.len()).context("range")?)?;
        // SAFETY: inside the allocation.
        unsafe { result::memcpy_htod_sync(to, bytes) }.map_err(|e| anyhow!(words("cuMemcpyHtoD", e)))?;
        finish_all()
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.at(offset..offset.checked_add(bytes.len()).context("range")?)?;
        // SAFETY: inside the allocation.
        unsafe { result::memcpy_dtoh_sync(bytes, from) }.map_err(|e| anyhow!(words("cuMemcpyDtoH", e)))
    }

    /// A completion says that the RDMA device wrote the bytes; on some buses they may still be on their way to the GPU.
    fn settle(&self) -> Result<()> {
        if !self.memory.context.gpudirect {
            return Ok(());
        }
        self.memory.context.bind()?;
        let target = sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the arguments are constants that this call accepts.
        unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) }
            .result()
            .map_err(|e| anyhow!(words("cuFlushGPUDirectRDMAWrites", e)))
    }
}
