//! Work of a call on its own stream, around what goes through the host: kernels inside a host.

use tinynccl_plan::error::Result;

/// Work that a call enqueues on its stream before its chunks go down and behind those that have come up. So a chunk is
/// with the host while kernels work on others.
pub(crate) trait Around {
    /// Enqueues what makes chunk `chunk`. Returns true if there was something.
    fn before(&mut self, _chunk: usize) -> Result<bool> {
        Ok(false)
    }

    /// Enqueues what needs nothing of the host, behind the first chunk on its way down.
    fn meanwhile(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns true if something follows chunk `chunk`.
    fn follows(&self, _chunk: usize) -> bool {
        false
    }

    /// Enqueues that; the stream then has this chunk, and all before it.
    fn after(&mut self, _chunk: usize) -> Result<()> {
        Ok(())
    }
}

/// A call that goes through the host, and no more.
pub(super) struct Nothing;

impl Around for Nothing {}
