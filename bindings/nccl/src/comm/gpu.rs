//! GPUs: which one a thread uses, and taking one for a while.

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::{CudaContext, sys};

use crate::abi::error::{Error, Result};
use crate::env::debug;

/// The primary context of a GPU. It is kept until the process ends, as CUDA's runtime keeps its own: memory of
/// `ncclMemAlloc` lives in it.
pub(crate) fn context(ordinal: usize) -> Result<Arc<CudaContext>> {
    static OPEN: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = open.iter().find(|context| context.ordinal() == ordinal) {
        return Ok(context.clone());
    }
    let _current = Current::keep()?;
    let context = tinynccl::cuda::open(ordinal)?;
    open.push(context.clone());
    Ok(context)
}

/// Opens the driver, once.
pub(crate) fn driver() -> Result<()> {
    static OPENED: OnceLock<()> = OnceLock::new();
    if OPENED.get().is_none() {
        tinynccl::cuda::available()?;
        let _ = OPENED.set(());
    }
    Ok(())
}

/// The GPU that this thread uses: of the driver's current context, else of CUDA's runtime if it is in this process,
/// else GPU 0.
pub(crate) fn current() -> Result<usize> {
    driver()?;
    let mut device = 0;
    // SAFETY: writes the number; without a context it fails and writes nothing.
    let status = unsafe { sys::cuCtxGetDevice(&mut device) };
    if status == sys::CUresult::CUDA_SUCCESS {
        return usize::try_from(device).map_err(|_| Error::internal(format!("the driver's device is {device}")));
    }
    Ok(of_runtime().unwrap_or(0))
}

/// The result of `cudaGetDevice`, where the runtime is in this process: it may know a device whose context it has not
/// created yet.
fn of_runtime() -> Option<usize> {
    const NAMES: [&CStr; 3] = [c"libcudart.so.13", c"libcudart.so.12", c"libcudart.so.11.0"];
    let find = |library: *mut c_void| {
        // SAFETY: a library that is loaded, or the default order; a text that ends with a zero.
        unsafe { libc::dlsym(library, c"cudaGetDevice".as_ptr()) }
    };
    // SAFETY: loads nothing: it only finds what is there.
    let loaded = |name: &&CStr| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let mut function = find(libc::RTLD_DEFAULT);
    if function.is_null() {
        let library = NAMES.iter().map(loaded).find(|library| !library.is_null())?;
        function = find(library);
        // SAFETY: opened above; the program has it open itself.
        unsafe { libc::dlclose(library) };
    }
    if function.is_null() {
        return None;
    }
    // SAFETY: the runtime's function of that name, `cudaError_t cudaGetDevice(int*)`.
    let get: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(function) };
    let mut device = -1;
    // SAFETY: writes the number.
    let status = unsafe { get(&mut device) };
    if status == 0 { usize::try_from(device).ok() } else { None }
}

/// Puts a thread's context back as it was when dropped: NCCL leaves the caller's device alone.
#[derive(Debug)]
pub(crate) struct Current {
    /// `None`: nothing was changed.
    before: Option<sys::CUcontext>,
}

impl Current {
    /// Keeps the thread's context as it is now, to be restored when dropped.
    pub(crate) fn keep() -> Result<Current> {
        driver()?;
        Ok(Current { before: Some(of_thread()) })
    }

    /// With `context` current.
    #[inline]
    pub(crate) fn enter(context: &CudaContext) -> Result<Current> {
        let before = of_thread();
        debug::on_device(context.ordinal());
        if before == context.cu_ctx() {
            return Ok(Current { before: None });
        }
        // SAFETY: a context that lives.
        unsafe { sys::cuCtxSetCurrent(context.cu_ctx()) }
            .result()
            .map_err(|e| Error::cuda(format!("taking GPU {}", context.ordinal()), e))?;
        Ok(Current { before: Some(before) })
    }
}

fn of_thread() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes the context; NULL where there is none.
    let _ = unsafe { sys::cuCtxGetCurrent(&mut context) };
    context
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current before.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}
