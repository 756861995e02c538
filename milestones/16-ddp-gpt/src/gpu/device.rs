//! The GPU of this rank: found, opened, and its two streams.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::result::stream::get_priority_range;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::error::{Unavailable, cuda, words};

/// The CUDA version that our bindings are for (Cargo.toml: cudarc's feature `cuda-12000`).
const BUILT_FOR: i32 = 12_000;

/// A GPU that is open.
#[derive(Debug)]
pub struct Gpu {
    /// Its context, shared with everything else in this process that uses the GPU.
    pub context: Arc<CudaContext>,
    /// Where the passes run.
    pub stream: Arc<CudaStream>,
    /// Where gradients are averaged. Its blocks go first when both streams have some to start: an average is short, and a peer
    /// waits for it.
    pub side: Arc<CudaStream>,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

/// How many GPUs there are, or what is missing. Makes no context.
pub fn count() -> Result<usize> {
    // SAFETY: only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::Driver.into());
    }
    let mut driver = 0;
    // SAFETY: writes the version; allowed before cuInit.
    unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(|e| unusable("cuDriverGetVersion", e))?;
    if driver < BUILT_FOR {
        // Functions of our version are not in it; calling one would end the program.
        return Err(Unavailable::OldDriver { has: driver, needs: BUILT_FOR }.into());
    }
    cudarc::driver::result::init().map_err(|e| unusable("cuInit", e))?;
    let count = CudaContext::device_count().map_err(|e| unusable("cuDeviceGetCount", e))?;
    if count < 1 {
        return Err(Unavailable::Device("the driver sees none".to_owned()).into());
    }
    // SAFETY: only try to load the libraries.
    let (compiler, blas) = unsafe { (cudarc::nvrtc::sys::is_culib_present(), cudarc::cublas::sys::is_culib_present()) };
    if !compiler {
        return Err(Unavailable::Compiler.into());
    }
    if !blas {
        return Err(Unavailable::Blas.into());
    }
    Ok(count as usize)
}

impl Gpu {
    /// Opens the GPU of the `local_rank`-th rank on this machine; with more ranks than GPUs they share.
    pub fn open(local_rank: usize) -> Result<Gpu> {
        let ordinal = local_rank % count()?;
        let opened = |e| cuda(&format!("cannot open GPU {ordinal}"), e);
        let context = CudaContext::new(ordinal).map_err(opened)?;
        // SAFETY: all buffers live as long as the streams that use them, and we order the two streams by events ourselves; cudarc's
        // own events per buffer would cost time and cannot be captured into a graph.
        unsafe { context.disable_event_tracking() };
        let (_, highest) = get_priority_range().map_err(opened)?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(Gpu {
            stream: context.new_stream().map_err(opened)?,
            side: context.new_stream_with_priority(highest).map_err(opened)?,
            capability: context.compute_capability().map_err(opened)?,
            multiprocessors: context.attribute(attribute).map_err(opened)?.max(1) as u32,
            context,
        })
    }

    /// Name and number.
    pub fn describe(&self) -> String {
        let name = self.context.name().unwrap_or_else(|_| "a GPU".to_owned());
        let (major, minor) = self.capability;
        format!(
            "{name} (GPU {}, {} SMs, compute capability {major}.{minor})",
            self.context.ordinal(),
            self.multiprocessors
        )
    }

    /// Waits until both streams are empty; errors of kernels show here.
    pub fn synchronize(&self) -> Result<()> {
        for stream in [&self.stream, &self.side] {
            stream.synchronize().map_err(|e| cuda("the GPU stopped", e))?;
        }
        Ok(())
    }
}

fn unusable(call: &str, error: DriverError) -> anyhow::Error {
    Unavailable::Device(format!("{call} says {}", words(error))).into()
}
