//! The GPU of this rank: found, opened, its two streams and its memory.

use std::fmt::Display;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use cudarc::driver::result::stream::get_priority_range;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, ValidAsZeroBits, sys};
use tinynccl::{Error, cuda};

/// A GPU that is open.
#[derive(Debug)]
pub struct Gpu {
    /// Its context, shared with everything else in this process that uses the GPU.
    pub context: Arc<CudaContext>,
    /// Stream of the passes.
    pub stream: Arc<CudaStream>,
    /// Stream of the averages of gradients. Its blocks go first when both streams have some to start: an average is
    /// short, and a peer waits for it.
    pub side: Arc<CudaStream>,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

/// Returns the number of GPUs, or what is missing ([`Error::Unsupported`]). Makes no context.
pub fn count() -> Result<usize> {
    let missing = |what: &str, detail: &str| Error::Unsupported { what: what.to_owned(), detail: detail.to_owned() };
    let find = || {
        let count = cuda::device_count()?;
        if count == 0 {
            let detail =
                "the driver sees no GPU; `nvidia-smi` lists those that it sees, CUDA_VISIBLE_DEVICES can hide them";
            return Err(missing("CUDA", detail));
        }
        cuda::nvrtc()?;
        // SAFETY: only tries to load the library.
        if !unsafe { cudarc::cublas::sys::is_culib_present() } {
            let detail = "neither libcublas.so nor libcublas.so.12 was found (of CUDA 13, make a link libcublas.so to libcublas.so.13): \
                          install the CUDA toolkit, or its part cuBLAS alone (Debian: libcublas12; pip: nvidia-cublas-cu12), and put \
                          its folder into LD_LIBRARY_PATH";
            return Err(missing("cuBLAS", detail));
        }
        Ok(count)
    };
    find().context(super::NOT_HERE)
}

impl Gpu {
    /// Opens the GPU of the `local_rank`-th rank on this machine; with more ranks than GPUs they share.
    pub fn open(local_rank: usize) -> Result<Gpu> {
        let ordinal = local_rank % count()?;
        let context = cuda::open(ordinal)?;
        // SAFETY: all buffers live as long as the streams that use them, and we order the two streams by events
        // ourselves; cudarc's own events per buffer would cost time and cannot be captured into a graph.
        unsafe { context.disable_event_tracking() };
        let opened = || failed(format!("cannot open GPU {ordinal}"));
        let (_, highest) = get_priority_range().map_err(opened())?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(Gpu {
            stream: context.new_stream().map_err(opened())?,
            side: context.new_stream_with_priority(highest).map_err(opened())?,
            capability: context.compute_capability().map_err(opened())?,
            multiprocessors: context.attribute(attribute).map_err(opened())?.max(1) as u32,
            context,
        })
    }

    /// Name and number.
    pub fn describe(&self) -> String {
        let name = self.context.name().unwrap_or_else(|_| "a GPU".to_owned());
        let (major, minor) = self.capability;
        let (ordinal, sms) = (self.context.ordinal(), self.multiprocessors);
        format!("{name} (GPU {ordinal}, {sms} SMs, compute capability {major}.{minor})")
    }

    /// Waits until both streams are empty; errors of kernels show here.
    pub fn synchronize(&self) -> Result<()> {
        [&self.stream, &self.side]
            .into_iter()
            .try_for_each(|stream| stream.synchronize().map_err(failed("the GPU stopped")))
    }
}

/// The driver's error, with what was being done.
pub(super) fn failed(doing: impl Display) -> impl FnOnce(DriverError) -> anyhow::Error {
    move |error| anyhow!("{doing}: {}", cuda::words(error))
}

/// An address in device memory; 0 for none.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub u64);

/// An array in device memory. Kernels and cuBLAS get its address; who enqueues them keeps the order.
#[derive(Debug)]
pub struct Array<T> {
    slice: CudaSlice<T>,
    at: Address,
}

impl<T: DeviceRepr + ValidAsZeroBits> Array<T> {
    /// `len` zeroes.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let (mib, ordinal) = ((len * size_of::<T>()) >> 20, gpu.context.ordinal());
        let doing = format!("cannot allocate {mib} MiB on GPU {ordinal} (a smaller --batch, or more ranks, need less)");
        let slice = gpu.stream.alloc_zeros::<T>(len.max(1)).map_err(failed(doing))?;
        let at = Address(slice.device_ptr(&gpu.stream).0);
        Ok(Array { slice, at })
    }

    /// The values of `host`.
    pub fn of(gpu: &Gpu, host: &[T]) -> Result<Self> {
        let mut array = Self::new(gpu, host.len())?;
        array.write(gpu, host)?;
        Ok(array)
    }

    /// Overwrites the first values.
    pub fn write(&mut self, gpu: &Gpu, host: &[T]) -> Result<()> {
        let copied = gpu.stream.memcpy_htod(host, &mut self.slice).and_then(|()| gpu.stream.synchronize());
        copied.map_err(failed("cannot copy to the GPU"))
    }

    /// Values number `from` to `to`, after everything that was enqueued.
    pub fn read(&self, gpu: &Gpu, from: usize, to: usize) -> Result<Vec<T>>
    where
        T: Clone + Default,
    {
        let mut host = vec![T::default(); to - from];
        gpu.synchronize()?;
        let copied = gpu.stream.memcpy_dtoh(&self.slice.slice(from..to), &mut host);
        copied.and_then(|()| gpu.stream.synchronize()).map_err(failed("cannot copy from the GPU"))?;
        Ok(host)
    }

    /// The address of value `i`.
    pub fn place(&self, i: usize) -> Address {
        Address(self.at.0 + (i * size_of::<T>()) as u64)
    }

    /// Number of values.
    pub fn size(&self) -> usize {
        self.slice.len()
    }
}

impl<T> From<&Array<T>> for Address {
    fn from(array: &Array<T>) -> Address {
        array.at
    }
}
