//! Headers of atomic operations: the request, and the value that was there before (InfiniBand specification, 9.3.4,
//! 9.5.3).

use super::{double, take, word};

/// Atomic extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicEth {
    /// Address of the 64-bit word in the responder's region; a multiple of 8.
    pub va: u64,
    /// The region's remote key.
    pub rkey: u32,
    /// Value that is stored (compare and swap) or added (fetch and add).
    pub swap_or_add: u64,
    /// Value that the word must have (compare and swap).
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes of the header.
    pub const LEN: usize = 28;

    /// Takes the header from the front of `bytes`; `None` where they are too few.
    pub fn parse(bytes: &mut &[u8]) -> Option<AtomicEth> {
        let raw: &[u8; AtomicEth::LEN] = take(bytes)?;
        Some(AtomicEth {
            va: double(raw, 0),
            rkey: word(raw, 8),
            swap_or_add: double(raw, 12),
            compare: double(raw, 20),
        })
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; AtomicEth::LEN] {
        let mut raw = [0; AtomicEth::LEN];
        raw[..8].copy_from_slice(&self.va.to_be_bytes());
        raw[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        raw[12..20].copy_from_slice(&self.swap_or_add.to_be_bytes());
        raw[20..].copy_from_slice(&self.compare.to_be_bytes());
        raw
    }
}

/// Atomic acknowledge extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicAckEth {
    /// The word before the operation.
    pub original: u64,
}

impl AtomicAckEth {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    /// Takes the header from the front of `bytes`; `None` where they are too few.
    pub fn parse(bytes: &mut &[u8]) -> Option<AtomicAckEth> {
        let raw: &[u8; AtomicAckEth::LEN] = take(bytes)?;
        Some(AtomicAckEth { original: double(raw, 0) })
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; AtomicAckEth::LEN] {
        self.original.to_be_bytes()
    }
}
