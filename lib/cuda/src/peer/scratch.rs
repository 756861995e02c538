//! Memory of a rank for the partial sums of schedules: its kernels alone use it.

use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;

use crate::window::{SCRATCH_BYTES, Window};
use tinynccl_plan::error::Result;
use tinynccl_sys::threads::lock;

/// Allocated when a schedule first needs it; freed with the communicator.
#[derive(Debug)]
pub(crate) struct Scratch {
    context: Arc<CudaContext>,
    memory: Mutex<Option<Window>>,
}

impl Scratch {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Scratch {
        Scratch { context: context.clone(), memory: Mutex::new(None) }
    }

    /// The address of [`SCRATCH_BYTES`].
    pub(super) fn address(&self) -> Result<u64> {
        let mut memory = lock(&self.memory);
        if let Some(window) = memory.as_ref() {
            return Ok(window.address);
        }
        // Sums are written before they are read.
        let window = Window::amid_calls(&self.context, SCRATCH_BYTES, 0, "partial sums of a schedule")?;
        Ok(memory.insert(window).address)
    }

    /// Bytes so far.
    pub(super) fn bytes(&self) -> usize {
        lock(&self.memory).as_ref().map_or(0, |window| window.bytes)
    }
}
