//! The buffer's content: words that differ between positions and between rounds, so that the check finds a shifted,
//! stale, or missing chunk.

use anyhow::{Result, ensure};

use crate::buffer::Buffer;

/// Bytes to generate, copy and compare at a time.
const PIECE: usize = 1 << 20;

/// Word `at` of round `round`: a mix of both (the finalizer of splitmix64), so that no two words are alike by design.
fn word(round: u64, at: u64) -> u64 {
    let mut x = (at + 1).wrapping_add(round.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Writes the bytes from `offset` on, which is a multiple of 8, to `bytes`.
fn bytes(round: u64, offset: usize, bytes: &mut [u8]) {
    for (at, place) in (offset as u64 / 8..).zip(bytes.chunks_mut(8)) {
        place.copy_from_slice(&word(round, at).to_le_bytes()[..place.len()]);
    }
}

fn pieces(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(PIECE).map(move |offset| (offset, PIECE.min(len - offset)))
}

/// Fills the whole buffer for `round`.
pub fn fill(buffer: &dyn Buffer, round: u64) -> Result<()> {
    let mut piece = vec![0; PIECE.min(buffer.len())];
    for (offset, len) in pieces(buffer.len()) {
        bytes(round, offset, &mut piece[..len]);
        buffer.write(offset, &piece[..len])?;
    }
    Ok(())
}

/// Compares every byte of the buffer with `round`. The error names the first that differs.
pub fn check(buffer: &dyn Buffer, round: u64) -> Result<()> {
    let mut expected = vec![0; PIECE.min(buffer.len())];
    let mut got = expected.clone();
    for (offset, len) in pieces(buffer.len()) {
        bytes(round, offset, &mut expected[..len]);
        buffer.read(offset, &mut got[..len])?;
        if let Some(at) = (0..len).find(|&at| got[at] != expected[at]) {
            let (got, want, of) = (got[at], expected[at], buffer.len());
            ensure!(false, "byte {} of {of} is {got:#04x}, expected {want:#04x} (round {round})", offset + at);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::host::HostBuffer;

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        for len in [1, 7, 4096, PIECE - 1, PIECE, PIECE + 9] {
            let buffer = HostBuffer::new(len, None).expect("memory");
            fill(&buffer, 3).expect("fits");
            check(&buffer, 3).expect("all right");
            assert!(check(&buffer, 4).is_err(), "another round");
            for at in [0, len / 2, len - 1] {
                let mut byte = [0];
                buffer.read(at, &mut byte).expect("fits");
                buffer.write(at, &[byte[0] ^ 1]).expect("fits");
                let error = check(&buffer, 3).expect_err("changed").to_string();
                assert!(error.starts_with(&format!("byte {at} of {len} is ")), "{error}");
                buffer.write(at, &byte).expect("fits");
            }
        }
    }

    #[test]
    fn a_shifted_copy_differs() {
        let (mut whole, mut shifted) = ([0; 64], [0; 64]);
        bytes(1, 0, &mut whole);
        bytes(1, 8, &mut shifted);
        assert_eq!(whole[8..], shifted[..56]);
        assert_ne!(whole, shifted);
    }
}
