//! Memory for measurements. It grows in place, only as far as there is time to touch it.

use std::ops::{Deref, DerefMut};

use tinynccl_plan::error::Result;
use tinynccl_transport::mapping::Mapping;

/// Longest buffer in bytes; a rank has two of them. Shared caches of up to 42 MiB are filled by two ranks.
pub(super) const LARGEST: usize = 16 << 20;
/// Two f32 of 1: sums of smaller numbers can be slow.
const ONES: u64 = 0x3f80_0000_3f80_0000;

/// Up to [`LARGEST`] bytes, as words. It reserves address space for all of them, and memory for the touched part. It
/// uses huge pages if the system has them: a fault of a 2 MiB page takes about as long as those of a few hundred 4 KiB
/// pages.
pub(super) struct Buffer {
    memory: Mapping,
    words: usize,
}

impl Buffer {
    pub(super) fn new() -> Result<Buffer> {
        Ok(Buffer { memory: Mapping::anonymous(LARGEST)?, words: 0 })
    }

    /// `bytes` bytes on ordinary pages, touched. `bytes` is less than a huge page.
    pub(super) fn ordinary(bytes: usize) -> Result<Buffer> {
        let mut buffer = Buffer { memory: Mapping::anonymous(bytes)?, words: 0 };
        buffer.grow(bytes);
        Ok(buffer)
    }

    /// Bytes that it can hold.
    pub(super) fn most(&self) -> usize {
        self.memory.len()
    }

    /// At least `bytes` bytes (at most [`Buffer::most`]), all of them touched.
    pub(super) fn grow(&mut self, bytes: usize) {
        let before = self.words;
        self.words = bytes.div_ceil(8).min(self.memory.len() / 8).max(before);
        if let Some(new) = self.get_mut(before..) {
            new.fill(ONES);
        }
    }
}

impl Deref for Buffer {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        // SAFETY: the mapping is aligned to a page; `words` never exceeds it, and any bits are a u64.
        unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr().cast(), self.words) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: as above; the mapping is ours alone, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().as_ptr().cast(), self.words) }
    }
}
