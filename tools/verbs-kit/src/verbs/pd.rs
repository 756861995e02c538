//! A protection domain: groups the memory regions and queue pairs that may be used together.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Result, anyhow};

use super::{Context, complain, ffi};

/// A protection domain (`struct ibv_pd`). A QP only reaches MRs of its own PD, so a leaked key is useless elsewhere.
#[derive(Debug)]
pub struct Pd {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs allows every call from every thread; the pointer is freed once, in `drop`.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// A new protection domain on a device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { ffi::ibv_alloc_pd(context.raw()) })
            .ok_or_else(|| anyhow!("ibv_alloc_pd({}): {}", context.name(), io::Error::last_os_error()))?;
        Ok(Arc::new(Pd { raw, context: Arc::clone(context) }))
    }

    /// The pointer for calls of libibverbs; valid while `self` is.
    pub fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }

    /// The PD's device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: allocated by us, freed once; its MRs and QPs held an `Arc` and are gone.
        complain("ibv_dealloc_pd", unsafe { ffi::ibv_dealloc_pd(self.raw()) });
    }
}
