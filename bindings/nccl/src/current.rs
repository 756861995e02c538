//! The GPU that the calling thread has chosen.

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};
use tinynccl::cuda;

use crate::fault::{Fault, Result};

/// The primary context of the current GPU.
///
/// # Errors
/// `ncclInvalidUsage` without a driver or a GPU.
pub(crate) fn context() -> Result<Arc<CudaContext>> {
    Ok(cuda::open(ordinal()?)?)
}

/// CUDA's number of the current GPU: that of the thread's context; without one, the run time's choice, which makes no
/// context before its first use up to CUDA 11; else 0, the default of both.
///
/// # Errors
/// As [`context`].
pub(crate) fn ordinal() -> Result<usize> {
    cuda::available()?;
    let current = result::ctx::get_current().map_err(|e| Fault::cuda("asking for the current context", e))?;
    if current.is_none() {
        return Ok(chosen_in_runtime().unwrap_or(0));
    }
    let mut device = 0;
    // SAFETY: writes the number; there is a current context.
    unsafe { sys::cuCtxGetDevice(&mut device) }.result().map_err(|e| Fault::cuda("asking for the current GPU", e))?;
    Ok(usize::try_from(device).unwrap_or(0))
}

/// `cudaGetDevice` of a run time that is in this process.
fn chosen_in_runtime() -> Option<usize> {
    const NAMES: [&CStr; 3] = [c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so.11.0"];
    type GetDevice = unsafe extern "C" fn(*mut c_int) -> c_int;
    let find = |library| {
        // SAFETY: a library that is loaded, or the list of all.
        let found = unsafe { libc::dlsym(library, c"cudaGetDevice".as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    let loaded = NAMES.iter().find_map(|name| {
        // SAFETY: opens nothing that is not open already.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if library.is_null() { None } else { find(library) }
    });
    let function = loaded.or_else(|| find(libc::RTLD_DEFAULT))?;
    // SAFETY: the run time's function has this type in every version.
    let get_device = unsafe { std::mem::transmute::<*mut libc::c_void, GetDevice>(function) };
    let mut device = 0;
    // SAFETY: writes the number.
    let status = unsafe { get_device(&mut device) };
    if status == 0 { usize::try_from(device).ok() } else { None }
}
