//! An open GPU: driver, device, primary context.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, DriverError};

use crate::why::Why;

/// The oldest driver that the bindings support: CUDA 12.0.
const OLDEST: i32 = 12_000;

/// A GPU with its primary context, the one that the CUDA runtime uses in this process.
#[derive(Debug)]
pub struct Context {
    /// The context.
    pub context: Arc<CudaContext>,
    /// The GPU's number among those that the driver shows this process.
    pub index: usize,
    /// The GPU's name and the driver's version.
    pub name: String,
    /// The driver reports that it can export a buffer as a dmabuf.
    pub dmabuf: bool,
    /// The driver reports that the GPU supports GPUDirect RDMA at all.
    pub gpudirect: bool,
}

impl Context {
    /// Opens GPU number `index`. The error is a [`Why`] if there is no driver or no GPU.
    pub fn open(index: usize) -> Result<Arc<Context>> {
        // cudarc panics in the first call if the library is missing.
        // SAFETY: opening libcuda runs its initializers, as every CUDA program does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Why::new(
                "no GPU: NVIDIA's driver library libcuda.so.1 is not here",
                "install NVIDIA's driver (Debian: nvidia-driver, libcuda1); in a container, start it with the GPUs (`--gpus all`)",
            )
            .into());
        }
        let count =
            CudaContext::device_count().map_err(|e| Why::new(format!("no GPU: {}", words("cuInit", e)), after(e)))?;
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .map_err(|e| anyhow!(words("cuDriverGetVersion", e)))?;
        if version < OLDEST {
            let (have, want) = (dotted(version), dotted(OLDEST));
            return Err(Why::new(
                format!("no GPU: the driver is for CUDA {have}"),
                format!("install one for {want} or later"),
            )
            .into());
        }
        let count = usize::try_from(count)?;
        if index >= count {
            return Err(Why::new(
                format!("no GPU {index} (--gpu): there are {count}"),
                "CUDA_VISIBLE_DEVICES may hide some",
            )
            .into());
        }
        let context =
            CudaContext::new(index).map_err(|e| anyhow!("GPU {index}: {}", words("cuDevicePrimaryCtxRetain", e)))?;
        let name = context.name().map_err(|e| anyhow!(words("cuDeviceGetName", e)))?;
        // A driver that does not know an attribute lacks the feature.
        let can = |attribute| context.attribute(attribute).is_ok_and(|value| value != 0);
        let dmabuf = can(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
        let gpudirect = can(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
        let name = format!("{name}, driver for CUDA {}", dotted(version));
        Ok(Arc::new(Context { context, index, name, dmabuf, gpudirect }))
    }

    /// Makes it the calling thread's current context, which the driver's calls use.
    pub fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| anyhow!(words("cuCtxSetCurrent", e)))
    }
}

/// A driver error: the call, the error's name in the manual, its meaning.
pub(super) fn words(call: &str, error: DriverError) -> String {
    let name = error.error_name().map(|n| n.to_string_lossy().into_owned());
    let text = error.error_string().map(|s| s.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{call}: {name} ({}, {text})", error.0 as u32),
        _ => format!("{call}: CUDA error {}", error.0 as u32),
    }
}

/// The remedy for a failed `cuInit`.
fn after(error: DriverError) -> &'static str {
    match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            "`nvidia-smi -L` lists the GPUs; CUDA_VISIBLE_DEVICES may hide them, or the container was started without"
        }
        sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "library and kernel module are of two versions: reboot, or reload the module after an update"
        }
        _ => "`nvidia-smi` and the kernel's log (dmesg) say more; is the module nvidia loaded?",
    }
}

/// 12040 is 12.4.
fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
