//! The CUDA driver: found, opened, and its errors as text.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::result::device;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, DriverError};

use tinynccl_plan::error::{Error, Result};

/// The CUDA version that our bindings are for (Cargo.toml: cudarc's feature `cuda-12000`).
const BUILT_FOR: i32 = 12_000;

/// Opens the driver, or returns an error that names the missing part.
///
/// # Errors
/// [`Error::Unsupported`] without a driver, with one too old, or without a GPU.
pub fn available() -> Result<()> {
    let missing = |detail: String| Error::Unsupported { what: "CUDA".to_owned(), detail };
    // SAFETY: only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing(
            "libcuda.so.1 was not found; it comes with NVIDIA's driver (Debian: nvidia-driver; in a container: start it with the GPUs, as by --gpus all)"
                .to_owned(),
        ));
    }
    let version = version().map_err(|e| missing(words(e)))?;
    if version < BUILT_FOR {
        // An older driver lacks functions of our version, and calling one would end the program.
        return Err(missing(format!(
            "the driver is for CUDA {}.{}, this library for {}.{} or later: install a newer driver",
            version / 1000,
            version % 1000 / 10,
            BUILT_FOR / 1000,
            BUILT_FOR % 1000 / 10
        )));
    }
    cudarc::driver::result::init().map_err(|e| missing(words(e)))
}

/// The CUDA version that the driver is for: 12040 is 12.4. It must be there.
pub(crate) fn version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: writes the version; allowed before cuInit.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

/// All devices that this process sees.
pub(crate) fn devices() -> Result<Vec<sys::CUdevice>, DriverError> {
    (0..device::get_count()?).map(device::get).collect()
}

/// Returns true if device `from` can reach the memory of `to`.
pub(crate) fn reaches(from: sys::CUdevice, to: sys::CUdevice) -> Result<bool, DriverError> {
    let mut can = 0;
    // SAFETY: both are devices of the driver; writes the answer.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from, to) }.result()?;
    Ok(can != 0)
}

/// Number of GPUs that the driver sees (`CUDA_VISIBLE_DEVICES` can hide some).
///
/// # Errors
/// As [`available`].
pub fn device_count() -> Result<usize> {
    available()?;
    let count = CudaContext::device_count().map_err(|e| cuda("device_count", "counting the GPUs", e))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// GPU number `ordinal` of those that the driver sees, with its primary context.
///
/// # Errors
/// As [`available`]; [`Error::InvalidArgument`] for a number that the driver does not have.
pub fn open(ordinal: usize) -> Result<Arc<CudaContext>> {
    let count = device_count()?;
    if ordinal >= count {
        let visible =
            std::env::var_os("CUDA_VISIBLE_DEVICES").map_or_else(|| "not set".to_owned(), |value| format!("{value:?}"));
        let numbers = match count {
            0 => "none".to_owned(),
            1 => "only GPU 0".to_owned(),
            _ => format!("GPUs 0 to {}", count - 1),
        };
        return Err(Error::invalid(
            "cuda::open",
            format!("there is no GPU {ordinal}: the driver sees {numbers} (CUDA_VISIBLE_DEVICES is {visible})"),
        ));
    }
    CudaContext::new(ordinal).map_err(|e| cuda("cuda::open", format!("opening GPU {ordinal}"), e))
}

/// An [`Error::Cuda`].
pub fn cuda(op: impl Into<String>, detail: impl Into<String>, error: DriverError) -> Error {
    Error::Cuda { op: op.into(), detail: detail.into(), status: words(error) }
}

/// CUDA's name, number and text of an error, and its usual cause.
pub fn words(error: DriverError) -> String {
    let text = |s: std::result::Result<&CStr, DriverError>| {
        s.map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned())
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
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "other programs or buffers hold the device's memory (nvidia-smi shows how much)"
        }
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            "a kernel touched memory that is not mapped, such as a host pointer or a freed buffer; the context is lost, only a new process helps"
        }
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => "compiled for another generation of GPU",
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "NVRTC is newer than the driver: install a newer driver, or an NVRTC of the driver's CUDA version (nvidia-smi shows it)"
        }
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "this libcuda is the CUDA toolkit's stub, made for linking: take its folder out of LD_LIBRARY_PATH"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "libcuda and the kernel's module are of different versions: restart the machine after an update of the driver"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => "the GPUs' fabric is not up: is nvidia-fabricmanager running?",
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process holds the GPU for itself (nvidia-smi -q -d COMPUTE shows its mode)"
        }
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS => {
            "a kernel used an address that is no multiple of its element; the context is lost, only a new process helps"
        }
        CUresult::CUDA_ERROR_NO_DEVICE => "the driver is here, a GPU is not",
        CUresult::CUDA_ERROR_INVALID_DEVICE => "the driver sees no GPU of that number",
        CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => "these GPUs cannot reach each other's memory",
        CUresult::CUDA_ERROR_MAP_FAILED => {
            "the other process's memory cannot be mapped here (are both in the same container, and does it share /dev/shm and the IPC namespace?)"
        }
        _ => return None,
    })
}

/// Copies within a device; nothing for 0 bytes.
///
/// # Safety
/// Both must be memory of `bytes` bytes until the stream, which is of this context, has passed the copy.
pub unsafe fn copy(
    op: &str,
    context: &CudaContext,
    stream: sys::CUstream,
    from: u64,
    to: u64,
    bytes: usize,
) -> Result<()> {
    if from == to || bytes == 0 {
        return Ok(());
    }
    // The driver refuses a stream of another device's context than the current one.
    context
        .bind_to_thread()
        // SAFETY: forwarded from the caller.
        .and_then(|()| unsafe { cudarc::driver::result::memcpy_dtod_async(to, from, bytes, stream) })
        .map_err(|e| cuda(op, "copying on the device", e))
}

/// While this lives the thread may allocate, map memory, load code and wait, also during a capture that forbids it (the
/// default mode does): none of that goes to the captured stream. Frameworks do such things in the middle of captures.
#[derive(Debug)]
pub struct Uncaptured(sys::CUstreamCaptureMode);

impl Uncaptured {
    /// The driver must be open.
    pub fn begin() -> Uncaptured {
        Uncaptured(exchange_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED))
    }
}

impl Drop for Uncaptured {
    fn drop(&mut self) {
        exchange_mode(self.0);
    }
}

/// Sets the thread's mode of captures, and gives the one before. A failure changes nothing; then what is done under it
/// fails.
fn exchange_mode(mut mode: sys::CUstreamCaptureMode) -> sys::CUstreamCaptureMode {
    // SAFETY: reads and writes the mode of this thread.
    if let Err(error) = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result() {
        log::debug!("the capture mode of the thread: {error:?}");
    }
    mode
}

/// Returns true if a stream is being captured into a graph.
///
/// # Safety
/// `stream` must be one, or the default one.
pub(crate) unsafe fn is_capturing(stream: sys::CUstream) -> Result<bool, DriverError> {
    // SAFETY: by the caller's word.
    unsafe { capture_of(stream) }.map(|capture| capture.is_some())
}

/// The number of the capture that a stream is part of, if there is one.
///
/// # Safety
/// As [`is_capturing`].
pub(crate) unsafe fn capture_of(stream: sys::CUstream) -> Result<Option<u64>, DriverError> {
    let (mut status, mut number) = (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY: a stream, by the caller's word; what is not asked for is NULL.
    unsafe { sys::cuStreamGetCaptureInfo_v2(stream, &mut status, &mut number, null_mut(), null_mut(), null_mut()) }
        .result()?;
    Ok((status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE).then_some(number))
}
