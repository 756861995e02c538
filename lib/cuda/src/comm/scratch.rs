//! Memory of one call.

use cudarc::driver::{DriverError, result, sys};

use super::communicator::DeviceComm;
use crate::driver::cuda;
use tinynccl_plan::error::{Error, Result};

impl DeviceComm {
    /// Runs `work`, which enqueues on `stream`, with the address of `bytes` bytes of our device. The memory is
    /// stream-ordered: the stream allocates it before what `work` enqueues and frees it behind, also in a graph.
    ///
    /// # Errors
    /// [`Error::Cuda`] when there is no memory left; those of `work`, after which the memory is freed too.
    ///
    /// # Safety
    /// `stream` must be of our device, and only what `work` enqueues on it may use the memory.
    pub unsafe fn with_scratch<T, E: From<Error>>(
        &self,
        stream: sys::CUstream,
        bytes: usize,
        work: impl FnOnce(u64) -> Result<T, E>,
    ) -> Result<T, E> {
        let failed = |e: DriverError| cuda("scratch", format!("{bytes} bytes of stream-ordered memory"), e);
        self.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the stream is our device's, by the caller's word; freed below, behind its last use.
        let at = unsafe { result::malloc_async(stream, bytes) }.map_err(failed)?;
        let outcome = work(at);
        // SAFETY: allocated above, on the same stream.
        let freed = unsafe { result::free_async(at, stream) }.map_err(failed);
        let value = outcome?;
        freed?;
        Ok(value)
    }
}
