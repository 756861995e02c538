//! The macro that exports functions with C's calling convention, and helpers for their bodies.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;

/// Result of a driver function; `Ok` is `CUDA_SUCCESS`.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Exports functions of the driver. Each must have the parameters that the bindings of CUDA's header give it, or this
/// does not compile. Arguments that are not used have a type alone: `_: c_uint`.
macro_rules! calls {
    ($(fn $name:ident($($argument:tt: $type:ty),* $(,)?) $body:block)*) => {$(
        /// The driver's function of that name.
        ///
        /// # Safety
        /// As CUDA documents it.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> cudarc::driver::sys::CUresult {
            let call = || -> $crate::calls::Answer {
                // SAFETY: each pointer is what CUDA documents for that argument: the caller of the C function sees to
                // it.
                #[allow(unused_unsafe, reason = "some need it")]
                unsafe { $body }
            };
            $crate::errors::result(call())
        }

        const _: unsafe fn($($type),*) -> cudarc::driver::sys::CUresult = cudarc::driver::sys::$name;
    )*};
}

/// Writes an answer to a caller's variable.
///
/// # Safety
/// `to` must be null or writable.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: writable, as the caller guarantees. Structures of C may lie anywhere.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// As [`put`], where null means that the caller does not want it.
///
/// # Safety
/// As [`put`].
pub(crate) unsafe fn put_if_asked<T>(to: *mut T, value: T) {
    // SAFETY: forwarded.
    let _ = unsafe { put(to, value) };
}

/// `Ok` if something holds, or the error.
pub(crate) fn ensure(holds: bool, otherwise: CUresult) -> Answer {
    if holds { Ok(()) } else { Err(otherwise) }
}

/// Locks; a thread that panicked with the lock held has left consistent data behind, as far as tests care.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
