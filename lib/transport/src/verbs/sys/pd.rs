//! A protection domain: queue pairs and memory of one domain can be used together.

use std::sync::Arc;

use super::{Context, Handle, ffi};
use tinynccl_plan::error::Result;

#[derive(Debug)]
pub(crate) struct Pd {
    raw: Handle<ffi::ibv_pd>,
    context: Arc<Context>,
}

impl Pd {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_alloc_pd(context.raw()) };
        let raw = Handle::new(raw, || format!("allocating a protection domain on {}", context.name()))?;
        Ok(Arc::new(Pd { raw, context: context.clone() }))
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.get()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}
