//! Count of the objects that use an object: it is not destroyed before them, as the kernel has it (`EBUSY`).

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// A count of users.
#[derive(Default)]
pub(crate) struct Uses(AtomicU32);

impl Uses {
    /// One more.
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One fewer; `true` where that was the last.
    pub(crate) fn release(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Fails with `EBUSY` while there are users.
    pub(crate) fn check(&self, object: &str, by: &str) -> Result<(), c_int> {
        match self.0.load(Ordering::Acquire) {
            0 => Ok(()),
            n => Err(crate::code(&softroce::Error::new(libc::EBUSY, format!("{object} is in use by {n} of its {by}")))),
        }
    }
}
