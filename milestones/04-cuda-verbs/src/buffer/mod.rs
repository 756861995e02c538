//! The bytes to move: a GPU's memory, or host memory in its place, which says so.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

use crate::pinned::Pinned;
use crate::probe::Memory;
use crate::why::Why;

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub mod pages;

/// The requested memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// A GPU's, or else host memory.
    Auto,
    /// Only a GPU's.
    Gpu,
    /// Host memory, even if there is a GPU.
    Host,
}

/// The buffer: the probe's questions, and copies.
///
/// Starting a copy between buffer and staging and waiting for it are separate calls, so that the copy overlaps with the
/// wire. `slot` numbers the copies in flight.
pub trait Buffer: Memory {
    /// One line for display: size and location.
    fn describe(&self) -> String;

    /// If a GPU's memory was wanted but not available, the reason.
    fn instead_of_gpu(&self) -> Option<&Why> {
        None
    }

    /// Starts to copy `range` of the buffer to `at` of `staging`. No one may touch that memory before
    /// [`Buffer::finish`].
    fn start_out(&self, range: Range<usize>, staging: &Pinned, at: usize, slot: usize) -> Result<()>;

    /// Starts to copy from `at` of `staging` to `range` of the buffer.
    fn start_in(&self, range: Range<usize>, staging: &Pinned, at: usize, slot: usize) -> Result<()>;

    /// Waits for the last copy of `slot`.
    fn finish(&self, slot: usize, deadline: Instant) -> Result<()>;

    /// Copies `bytes` to `offset`, without staging.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Copies from `offset`, without staging.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// Makes what an RDMA device wrote into the buffer visible to [`Buffer::read`].
    fn settle(&self) -> Result<()>;
}

/// Allocates a buffer of `len` bytes according to `choice`, for `slots` copies at a time. With [`Choice::Auto`] and no
/// GPU it is host memory, which carries the reason.
///
/// # Errors
/// [`Why`] for [`Choice::Gpu`] without a usable GPU; out of memory.
pub fn take(choice: Choice, gpu: usize, len: usize, slots: usize) -> Result<Box<dyn Buffer>> {
    if choice == Choice::Host {
        return Ok(Box::new(host::HostBuffer::new(len, None)?));
    }
    match gpu_buffer(gpu, len, slots) {
        Ok(buffer) => Ok(buffer),
        Err(error) => match error.downcast::<Why>() {
            Ok(why) if choice == Choice::Auto => Ok(Box::new(host::HostBuffer::new(len, Some(why))?)),
            Ok(why) => Err(why.into()),
            Err(error) => Err(error),
        },
    }
}

#[cfg(feature = "cuda")]
fn gpu_buffer(gpu: usize, len: usize, slots: usize) -> Result<Box<dyn Buffer>> {
    let context = cuda::context::Context::open(gpu)?;
    Ok(Box::new(cuda::CudaBuffer::new(&context, len, slots)?))
}

#[cfg(not(feature = "cuda"))]
fn gpu_buffer(_: usize, _: usize, _: usize) -> Result<Box<dyn Buffer>> {
    Err(Why::new("no GPU: this program was built without CUDA", "build it with the feature cuda (the default)").into())
}
