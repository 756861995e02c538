//! Splits the buffer into chunks, which pass in order through a ring of slots.

use std::ops::Range;

/// The split. `chunk` is 1 to `bytes`, `slots` at least 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Bytes of the buffer.
    pub bytes: usize,
    /// Bytes of a chunk; the last one may be shorter.
    pub chunk: usize,
    /// Chunks in flight at a time: slots of staging memory, or posted requests.
    pub slots: usize,
}

impl Plan {
    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.bytes.div_ceil(self.chunk)
    }

    /// The range of chunk `index` in the buffer.
    pub fn range(&self, index: usize) -> Range<usize> {
        let start = index * self.chunk;
        start..self.bytes.min(start + self.chunk)
    }

    /// The slot of chunk `index`.
    pub fn slot(&self, index: usize) -> usize {
        index % self.slots
    }

    /// The range of chunk `index` in the staging memory.
    pub fn staged(&self, index: usize) -> Range<usize> {
        let start = self.slot(index) * self.chunk;
        start..start + self.range(index).len()
    }

    /// Bytes of staging memory.
    pub fn staging(&self) -> usize {
        self.slots * self.chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_once_and_no_slot_twice(bytes in 1_usize..5000, chunk in 1_usize..700, slots in 2_usize..5) {
            let plan = Plan { bytes, chunk: chunk.min(bytes), slots };
            let mut next = 0;
            for index in 0..plan.chunks() {
                let (range, staged) = (plan.range(index), plan.staged(index));
                prop_assert_eq!(range.start, next);
                prop_assert!(!range.is_empty() && staged.len() == range.len());
                prop_assert!(staged.end <= plan.staging());
                for later in index + 1..plan.chunks().min(index + slots) {
                    let other = plan.staged(later);
                    prop_assert!(other.start >= staged.end || other.end <= staged.start);
                }
                next = range.end;
            }
            prop_assert_eq!(next, bytes);
        }
    }
}
