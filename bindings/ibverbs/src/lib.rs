//! libibverbs' C interface over `softroce`: a `libibverbs.so.1` that unchanged programs load.
//!
//! Each object that C sees is the first part of one of ours, so a pointer to one is a pointer to the other; what makes
//! it boxes it, what destroys it takes the box back. A thin layer: what a call means is in `softroce`.
//!
//! Every function has the contract of its namesake in rdma-core's manual pages: pointers are valid objects of this
//! library, not used after they were destroyed, and memory that is registered or posted stays as long as verbs asks
//! for.

#![allow(clippy::missing_safety_doc, reason = "the contract of all is above")]

mod abi;
mod ah;
mod context;
mod cq;
mod device;
mod exports;
mod memory;
mod names;
mod qp;
mod srq;
mod wr;

use std::ffi::c_int;

/// Hands an object over to C.
fn give<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Takes an object back.
///
/// # Safety
/// `give` made the pointer, and nobody uses it after this.
unsafe fn take<T, C>(pointer: *mut C) -> Box<T> {
    // SAFETY: by the caller; the C structure is the first field of ours.
    unsafe { Box::from_raw(pointer.cast()) }
}

/// An error for a call that returns a pointer: null and `errno`.
fn null<T>(error: &softroce::Error) -> *mut T {
    log::warn!("{error}");
    set_errno(error.errno());
    std::ptr::null_mut()
}

/// An error for a call that returns its number.
fn code(error: &softroce::Error) -> c_int {
    log::warn!("{error}");
    set_errno(error.errno());
    error.errno()
}

fn set_errno(errno: c_int) {
    // SAFETY: the place of this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}
