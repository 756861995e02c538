//! Targets of symbols, which may change while a program runs.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Target of a symbol: a function of ours until the system's library is open, then its function.
#[repr(transparent)]
pub(crate) struct Slot(AtomicPtr<c_void>);

impl Slot {
    pub(crate) const fn new(until_then: *const ()) -> Slot {
        Slot(AtomicPtr::new(until_then.cast_mut().cast()))
    }

    pub(crate) fn get(&self) -> *mut c_void {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, target: *mut c_void) {
        self.0.store(target, Ordering::Relaxed);
    }
}

/// A symbol that leads on, with its version.
pub(crate) type Forward = (&'static CStr, &'static CStr, &'static Slot);

/// A text of a macro, which ends with a zero.
pub(crate) fn text(bytes: &'static str) -> &'static CStr {
    CStr::from_bytes_until_nul(bytes.as_bytes()).unwrap_or_default()
}
