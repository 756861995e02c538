//! This machine's CUDA driver and GPUs, without opening a GPU.

use cudarc::driver::result::device;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::api::{available, cuda, devices, reaches, version};
use super::compile;
use tinynccl_plan::error::Result;

/// The driver and its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inventory {
    /// CUDA version of the driver: 12.4 is `(12, 4)`.
    pub driver: (i32, i32),
    /// The GPUs that are visible to this process (`CUDA_VISIBLE_DEVICES`), in the driver's order.
    pub gpus: Vec<Gpu>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Memory in bytes.
    pub memory: usize,
    /// The other GPUs whose memory it can reach.
    pub peers: Vec<usize>,
}

/// Queries the driver.
///
/// # Errors
/// As [`available`]; [`Error::Cuda`](tinynccl_plan::Error::Cuda) when the driver does not answer.
pub fn inventory() -> Result<Inventory> {
    available()?;
    let failed = |e| cuda("cuda::inventory", "describing the GPUs", e);
    let version = version().map_err(failed)?;
    let devices = devices().map_err(failed)?;
    let mut gpus = Vec::with_capacity(devices.len());
    for (ordinal, &one) in devices.iter().enumerate() {
        // SAFETY: a device of the driver.
        let ask = |attribute| unsafe { device::get_attribute(one, attribute) }.map_err(failed);
        let mut peers = Vec::new();
        for (other, &to) in devices.iter().enumerate() {
            if other != ordinal && reaches(one, to).map_err(failed)? {
                peers.push(other);
            }
        }
        gpus.push(Gpu {
            name: device::get_name(one).map_err(failed)?,
            capability: (
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: a device of the driver.
            memory: unsafe { device::total_mem(one) }.map_err(failed)?,
            peers,
        });
    }
    Ok(Inventory { driver: (version / 1000, version % 1000 / 10), gpus })
}

/// Version of NVRTC, which compiles the kernels.
///
/// # Errors
/// [`Error::Unsupported`](tinynccl_plan::Error::Unsupported) where it is not found.
pub fn nvrtc() -> Result<(i32, i32)> {
    compile::version()
}
