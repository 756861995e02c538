//! Finds, opens, and describes the device, and explains CUDA's errors.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError};

use crate::unavailable::Unavailable;

/// The CUDA version of our bindings (Cargo.toml: cudarc's feature `cuda-12000`).
const BUILT_FOR: i32 = 12_000;

/// An open device, with the attributes used here.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) name: String,
    /// Version of the driver in CUDA's encoding: 13000 is 13.0.
    pub(crate) driver: i32,
    /// Compute capability: the device's instruction set.
    pub(crate) capability: (i32, i32),
    /// Streaming multiprocessors (SMs): each runs its own blocks.
    pub(crate) multiprocessors: u32,
    pub(crate) l2_bytes: usize,
    /// Memory bandwidth in GB/s, computed from the bus width and the clock.
    pub(crate) memory_peak: f64,
}

impl Device {
    /// Opens device `ordinal`. The error names the missing part.
    pub(crate) fn open(ordinal: usize) -> Result<Device> {
        // SAFETY: only tries to load the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(Unavailable::Driver.into());
        }
        let mut driver = 0;
        // SAFETY: writes the version to `driver`; allowed before cuInit.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().map_err(|e| unusable("cuDriverGetVersion", e))?;
        if driver < BUILT_FOR {
            // It lacks functions of our version; calling one would panic.
            return Err(Unavailable::OldDriver { has: driver, needs: BUILT_FOR }.into());
        }
        cudarc::driver::result::init().map_err(|e| unusable("cuInit", e))?;
        let count = CudaContext::device_count().map_err(|e| unusable("cuDeviceGetCount", e))?;
        if usize::try_from(count).unwrap_or(0) <= ordinal {
            let cause = format!("device {ordinal} was asked for, the driver sees {count}");
            return Err(Unavailable::Device(cause).into());
        }
        let context = CudaContext::new(ordinal).map_err(|e| cuda("cannot open the device", e))?;
        let ask = |attribute| context.attribute(attribute).map_err(|e| cuda("cannot ask for an attribute", e));
        let positive = |attribute| ask(attribute).map(|value| value.max(0) as usize);
        log::info!("device {ordinal} of {count}, the driver is for CUDA {}.{}", driver / 1000, driver % 1000 / 10);
        let bits = ask(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        let khz = ask(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        Ok(Device {
            name: context.name().map_err(|e| cuda("cannot ask for the name", e))?,
            driver,
            capability: context.compute_capability().map_err(|e| cuda("cannot ask for the capability", e))?,
            multiprocessors: positive(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            l2_bytes: positive(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            // Two transfers per clock.
            memory_peak: 2.0 * f64::from(khz) * 1e3 * f64::from(bits) / 8.0 / 1e9,
            context,
        })
    }

    pub(crate) fn describe(&self) -> Result<String> {
        let (free, total) = self.context.mem_get_info().map_err(|e| cuda("cannot ask for the free memory", e))?;
        let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
        Ok(format!(
            "{}: {} SMs, compute capability {}.{}, {:.1} of {:.1} GiB free, L2 {:.0} MiB, memory {:.0} GB/s by its bus; driver for CUDA {}.{}",
            self.name,
            self.multiprocessors,
            self.capability.0,
            self.capability.1,
            gib(free),
            gib(total),
            self.l2_bytes as f64 / (1 << 20) as f64,
            self.memory_peak,
            self.driver / 1000,
            self.driver % 1000 / 10,
        ))
    }
}

fn unusable(call: &str, error: DriverError) -> anyhow::Error {
    Unavailable::Device(format!("{call} says {}", words(error))).into()
}

/// `error` with a description of the failed operation.
pub(crate) fn cuda(doing: &str, error: DriverError) -> anyhow::Error {
    anyhow!("{doing}: {}", words(error))
}

/// CUDA's name, number and text of an error, and its usual cause.
fn words(error: DriverError) -> String {
    let text = |s: std::result::Result<&std::ffi::CStr, DriverError>| {
        s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let mut line = format!("{} ({}): {}", text(error.error_name()), error.0 as u32, text(error.error_string()));
    if let Some(cause) = likely_cause(error.0) {
        line.push_str("; ");
        line.push_str(cause);
    }
    line
}

fn likely_cause(result: CUresult) -> Option<&'static str> {
    Some(match result {
        CUresult::CUDA_ERROR_INVALID_VALUE => {
            "for a launch: more threads in a block, or more blocks, than the device takes"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "the three vectors do not fit: take fewer elements",
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            "a kernel touched memory that is not mapped; the context is lost and every later call fails, only a new process helps"
        }
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS => {
            "an access of 16 bytes needs an address that is a multiple of 16; the context is lost"
        }
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => "compiled for another generation of GPU",
        CUresult::CUDA_ERROR_NO_DEVICE => "the driver is here, a GPU is not",
        _ => return None,
    })
}
