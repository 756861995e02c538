//! A protection domain: queue pairs and memory of one domain can be used together.

use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ffi;

use super::{Context, check_on_drop, last_error};
use crate::error::Result;

#[derive(Debug)]
pub(in super::super) struct Pd {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs may be called on one object from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(in super::super) fn new(context: &Arc<Context>) -> Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_alloc_pd(context.raw()) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Arc::new(Pd { raw, context: context.clone() })),
            None => Err(last_error(format!("allocating a protection domain on {}", context.name()))),
        }
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }

    pub(in super::super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: memory regions and queue pairs hold an `Arc` of their domain, so none is left.
        check_on_drop(unsafe { ffi::ibv_dealloc_pd(self.raw()) }, "freeing a protection domain");
    }
}
