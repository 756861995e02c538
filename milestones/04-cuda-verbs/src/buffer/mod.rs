//! The bytes to move: a GPU's memory, or memory of this process that stands for it and says so.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Instant;

use anyhow::{Result, ensure};

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

/// CPU memory for staging. Reached by raw copies only: a device may write to it.
pub struct Pinned {
    start: NonNull<u8>,
    len: usize,
    kind: &'static str,
    /// Frees it.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the memory is only reached by copies of raw pointers, and freed by its owner, which is `Send`.
unsafe impl Send for Pinned {}
// SAFETY: as above; who copies when is ordered by the transfer, and there are no references to break.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Memory of `owner`: `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes are valid for reads and writes, and initialized, as long as `owner` lives; nobody has a reference.
    unsafe fn new(start: NonNull<u8>, len: usize, kind: &'static str, owner: Box<dyn Any + Send + Sync>) -> Pinned {
        Pinned { start, len, kind, _owner: owner }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What memory it is, for people.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// A pointer to the bytes of `range`, which is checked.
    pub fn at(&self, range: Range<usize>) -> Result<*mut u8> {
        ensure!(range.start <= range.end && range.end <= self.len, "bytes {range:?} of {} of staging", self.len);
        // SAFETY: within the memory, as just checked.
        Ok(unsafe { self.start.as_ptr().add(range.start) })
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).field("kind", &self.kind).finish_non_exhaustive()
    }
}
