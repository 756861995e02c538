//! libibverbs under types that free what they hold: one object per file.
//!
//! By default the functions are those of `softroce-verbs`, an RDMA device in user space; with the feature `verbs` they
//! are those of the system's libibverbs. Names and structures are the same.
//!
//! Each object keeps the ones it depends on alive through `Arc`s, so that they are destroyed in the order that
//! libibverbs wants, on error paths too. Destroying never panics: what fails is logged.

#[cfg(feature = "verbs")]
use ibverbs_sys as ffi;
#[cfg(not(feature = "verbs"))]
use softroce_verbs as ffi;

mod channel;
mod context;
mod cq;
mod event;
mod gid;
mod mr;
mod pd;
mod qp;
pub(crate) mod status;

pub(crate) use channel::Channel;
pub(crate) use context::{Context, device_names};
pub(crate) use cq::{Completion, Cq, Outcome};
pub(crate) use event::Event;
pub(crate) use gid::{Gid, GidEntry, GidType};
pub(crate) use mr::{Access, Mr};
pub(crate) use pd::Pd;
pub(crate) use qp::{Capacity, Qp, Remote, Sge, Timing, Write};

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;

use tinynccl_plan::error::Error;

/// An object of libibverbs, destroyed when it is dropped. It is the first field of its owner, which keeps `Arc`s of all
/// that the object was made from.
struct Handle<T: Object>(NonNull<T>);

// SAFETY: libibverbs may be called on one object from any thread (rdma-core, `Documentation/libibverbs.md`).
unsafe impl<T: Object> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Object> Sync for Handle<T> {}

impl<T: Object> Handle<T> {
    /// Owns `raw`, the object that a call of libibverbs has made; returns the call's error if it is null.
    fn new(raw: *mut T, what: impl FnOnce() -> String) -> Result<Handle<T>, Error> {
        NonNull::new(raw).map(Handle).ok_or_else(|| last_error(what()))
    }

    #[inline(always)]
    fn get(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T: Object> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: nothing that was made from the object is left, because it would keep an `Arc` of the object's owner.
        // Posted work ends with its queue pair, and the memory that it names is freed after that.
        let result = unsafe { T::destroy(self.get()) };
        // There is no caller to return it to.
        if let Err(e) = check(result, || T::DESTROYING.to_owned()) {
            log::error!("{e}");
        }
    }
}

impl<T: Object> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An object of libibverbs that can be destroyed.
trait Object {
    const DESTROYING: &'static str;

    /// # Safety
    /// The object must be valid, and nothing may use it afterwards.
    unsafe fn destroy(raw: *mut Self) -> c_int;
}

macro_rules! objects {
    ($($object:ident: $destroy:ident, $doing:literal;)*) => {$(
        impl Object for ffi::$object {
            const DESTROYING: &'static str = $doing;

            unsafe fn destroy(raw: *mut Self) -> c_int {
                // SAFETY: by the caller.
                unsafe { ffi::$destroy(raw) }
            }
        }
    )*};
}

objects! {
    ibv_context: ibv_close_device, "closing an RDMA device";
    ibv_pd: ibv_dealloc_pd, "freeing a protection domain";
    ibv_mr: ibv_dereg_mr, "deregistering memory";
    ibv_comp_channel: ibv_destroy_comp_channel, "destroying a completion channel";
    ibv_cq: ibv_destroy_cq, "destroying a completion queue";
    ibv_qp: ibv_destroy_qp, "destroying a queue pair";
}

/// The error of a call that returned a null pointer and set `errno`.
#[cold]
fn last_error(what: impl Into<String>) -> Error {
    Error::io("verbs", what, &std::io::Error::last_os_error())
}

/// The error of a call that returned an error number, or -1 and set `errno`.
fn check(result: c_int, what: impl FnOnce() -> String) -> Result<(), Error> {
    match result {
        0 => Ok(()),
        e if e > 0 => Err(Error::Os { op: "verbs".to_owned(), detail: what(), errno: e }),
        _ => Err(last_error(what())),
    }
}
