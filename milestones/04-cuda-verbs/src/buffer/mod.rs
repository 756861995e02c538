//! The bytes to move: a GPU's memory, or memory of this process that stands for it and says so.

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

/// Which memory to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// A GPU's, else host memory.
    Auto,
    /// A GPU's, or nothing.
    Gpu,
    /// Host memory, also where there is a GPU.
    Host,
}

/// The buffer: what the probe asks of it, and copies.
///
/// A copy between buffer and staging is started and then waited for, so that it runs beside the wire. `slot` numbers the
/// copies that are under way at a time.
pub trait Buffer: Memory {
    /// One line for people: size and place.
    fn describe(&self) -> String;

    /// Why it is not a GPU's memory, where it is not although one was wanted.
    fn instead_of_gpu(&self) -> Option<&Why> {
        None
    }

    /// Starts to copy `range` of the buffer to `at` of `staging`, which may not be touched before [`Buffer::finish`].
    fn start_out(&self, range: Range<usize>, staging: &Pinned, at: usize, slot: usize) -> Result<()>;

    /// Starts to copy from `at` of `staging` to `range` of the buffer.
    fn start_in(&self, range: Range<usize>, staging: &Pinned, at: usize, slot: usize) -> Result<()>;

    /// Waits until the last copy of `slot` is done.
    fn finish(&self, slot: usize, deadline: Instant) -> Result<()>;

    /// Copies `bytes` to `offset`, without staging.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Copies from `offset`, without staging.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// Makes what an RDMA device wrote into the buffer visible to [`Buffer::read`].
    fn settle(&self) -> Result<()>;
}

/// Takes a buffer of `len` bytes as `choice` says, for `slots` copies at a time. With [`Choice::Auto`] and no GPU it is
/// host memory, which says why.
///
/// # Errors
/// [`Why`] for [`Choice::Gpu`] without a usable GPU; no memory.
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
