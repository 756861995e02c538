//! Staging memory: CPU memory, pinned if a GPU copies to it.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

use anyhow::{Result, ensure};

/// CPU memory for staging. Only raw copies access it, because a device may write to it.
pub struct Pinned {
    start: NonNull<u8>,
    len: usize,
    kind: &'static str,
    /// Frees it.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: only copies through raw pointers access the memory, and its owner, which is `Send`, frees it.
unsafe impl Send for Pinned {}
// SAFETY: as above; the transfer orders the copies, and there are no references to invalidate.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Memory of `owner`: `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes are valid for reads and writes, and initialized, as long as `owner` lives; no one has a reference.
    pub(crate) unsafe fn new(
        start: NonNull<u8>,
        len: usize,
        kind: &'static str,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Pinned {
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

    /// Description of the memory, for display.
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
