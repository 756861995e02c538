//! Sums of memory when it was written: memory that has another sum later has changed by itself.

use std::collections::BTreeMap;
use std::slice;

use super::sums::{blocks, sum};

/// Memory of one run, by address: its blocks' lengths and sums. Blocks never overlap.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    blocks: BTreeMap<usize, (usize, u64)>,
}

/// A block that does not have the sum that it had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Changed {
    /// Address.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    pub(crate) expected: u64,
    pub(crate) got: u64,
}

impl Ledger {
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// Forgets what overlaps the memory, which is about to be written, or has been.
    pub(crate) fn forget(&mut self, at: usize, bytes: usize) {
        let overlapping = |(&start, &(len, _)): (&usize, &(usize, u64))| (start + len > at).then_some(start);
        while let Some(start) = self.blocks.range(..at + bytes).next_back().and_then(overlapping) {
            self.blocks.remove(&start);
        }
    }

    /// Remembers the memory as it is now.
    ///
    /// # Safety
    /// Readable, and not written meanwhile.
    pub(crate) unsafe fn wrote(&mut self, at: *const u8, bytes: usize) {
        self.forget(at.addr(), bytes);
        for (skip, len) in blocks(bytes) {
            // SAFETY: by the caller.
            let block = unsafe { slice::from_raw_parts(at.add(skip), len) };
            self.blocks.insert(at.addr() + skip, (len, sum(block)));
        }
    }

    /// The sums of the memory when it was written, if all of it was written in [`blocks`] that begin at `at`.
    pub(crate) fn sums(&self, at: usize, bytes: usize) -> Option<Vec<u64>> {
        let known = |(skip, len)| self.blocks.get(&(at + skip)).filter(|(l, _)| *l == len).map(|(_, sum)| *sum);
        blocks(bytes).map(known).collect()
    }

    /// Compares all blocks inside the memory with what they were.
    ///
    /// # Safety
    /// Blocks of this ledger inside it must be readable.
    pub(crate) unsafe fn check(&self, at: usize, bytes: usize) -> Result<(), Changed> {
        let end = at.saturating_add(bytes);
        for (&start, &(len, expected)) in self.blocks.range(at..end) {
            if start + len > end {
                break;
            }
            // SAFETY: by the caller; the address was a pointer's when it was entered.
            let got = sum(unsafe { slice::from_raw_parts(std::ptr::with_exposed_provenance(start), len) });
            if got != expected {
                return Err(Changed { at: start, bytes: len, expected, got });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::BLOCK;
    use super::*;

    #[test]
    fn a_flipped_bit_is_found_where_it_is_and_memory_that_was_written_again_is_as_new() {
        let mut memory = vec![7u8; 3 * BLOCK + 100];
        let at = memory.as_mut_ptr();
        let len = memory.len();
        let mut ledger = Ledger::default();
        // SAFETY: all within the vector.
        unsafe {
            ledger.wrote(at, len);
            assert_eq!(ledger.check(at.addr(), len), Ok(()));
            *at.add(BLOCK + 5) ^= 16;
            let found = ledger.check(at.addr(), len).unwrap_err();
            assert_eq!((found.at, found.bytes), (at.addr() + BLOCK, BLOCK));
            assert_eq!(ledger.check(at.addr(), BLOCK), Ok(()), "another block");
            assert_eq!(ledger.check(at.addr() + BLOCK + 1, BLOCK), Ok(()), "no whole block");
            // Written in another cut: the blocks that it overlaps are forgotten.
            ledger.wrote(at.add(BLOCK - 1), 2 * BLOCK);
            assert_eq!(ledger.check(at.addr(), len), Ok(()));
            *at = 0;
            assert_eq!(ledger.check(at.addr(), len), Ok(()), "forgotten");
            *at.add(len - 1) ^= 1;
            assert_eq!(ledger.check(at.addr(), len).unwrap_err().bytes, 100);
        }
        assert_eq!(ledger.sums(at.addr() + BLOCK - 1, 2 * BLOCK).map(|sums| sums.len()), Some(2));
        assert_eq!(ledger.sums(at.addr(), BLOCK), None);
        ledger.clear();
        assert_eq!(ledger.sums(at.addr() + 3 * BLOCK, 100), None);
    }
}
