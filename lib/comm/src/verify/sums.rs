//! XXH3 sums of blocks of bytes.

use std::hash::Hasher as _;

use twox_hash::xxhash3_64::Hasher;

/// Bytes of a block, except at the end of a message or of a part.
pub(crate) const BLOCK: usize = 64 << 10;

/// Sum of one block.
#[inline]
pub(crate) fn sum(block: &[u8]) -> u64 {
    Hasher::oneshot(block)
}

/// Blocks of `bytes` bytes: offset and length of each.
pub(crate) fn blocks(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes.div_ceil(BLOCK)).map(move |i| (i * BLOCK, BLOCK.min(bytes - i * BLOCK)))
}

/// Sums of the blocks of a message whose bytes come in pieces.
#[derive(Default)]
pub(crate) struct Running {
    /// Bytes of the blocks that are complete.
    done: usize,
    /// Block that is not complete, and its bytes so far.
    open: Option<(Hasher, usize)>,
}

impl Running {
    /// Adds a piece; `done` gets the offset, the length and the sum of each block that is complete.
    pub(crate) fn add(&mut self, mut piece: &[u8], mut done: impl FnMut(usize, usize, u64)) {
        while !piece.is_empty() {
            if self.open.is_none() && piece.len() >= BLOCK {
                let (block, rest) = piece.split_at(BLOCK);
                done(self.done, BLOCK, sum(block));
                (self.done, piece) = (self.done + BLOCK, rest);
                continue;
            }
            let (hasher, bytes) = self.open.get_or_insert_with(|| (Hasher::new(), 0));
            let (block, rest) = piece.split_at(piece.len().min(BLOCK - *bytes));
            hasher.write(block);
            *bytes += block.len();
            if *bytes == BLOCK {
                done(self.done, BLOCK, hasher.finish());
                (self.done, self.open) = (self.done + BLOCK, None);
            }
            piece = rest;
        }
    }

    /// Ends the message; the next one begins at offset 0.
    pub(crate) fn end(&mut self, mut done: impl FnMut(usize, usize, u64)) {
        if let Some((hasher, bytes)) = self.open.take() {
            done(self.done, bytes, hasher.finish());
        }
        self.done = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_have_the_sums_of_the_whole(len in 0..3 * BLOCK + 9, cuts in prop::collection::vec(0..=3 * BLOCK, 0..5)) {
            let data: Vec<u8> = (0..len).map(|i| ((i * i) >> 3) as u8).collect();
            let whole: Vec<_> = blocks(len).map(|(at, n)| (at, n, sum(&data[at..at + n]))).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(len)).chain([0, len]).collect();
            cuts.sort_unstable();
            let (mut got, mut running) = (Vec::new(), Running::default());
            for pair in cuts.windows(2) {
                running.add(&data[pair[0]..pair[1]], |at, n, sum| got.push((at, n, sum)));
            }
            running.end(|at, n, sum| got.push((at, n, sum)));
            prop_assert_eq!(got, whole);
        }
    }
}
