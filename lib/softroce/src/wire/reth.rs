//! RDMA extended transport header: address, key and length of remote memory (InfiniBand specification, 9.3.3).

use super::{double, take, word};

/// RDMA extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reth {
    /// Address in the responder's memory region.
    pub va: u64,
    /// The region's remote key.
    pub rkey: u32,
    /// Bytes of the whole message, up to 2^31.
    pub len: u32,
}

impl Reth {
    /// Bytes of the header.
    pub const LEN: usize = 16;

    /// Takes the header from the front of `bytes`; `None` where they are too few.
    pub fn parse(bytes: &mut &[u8]) -> Option<Reth> {
        let raw: &[u8; Reth::LEN] = take(bytes)?;
        Some(Reth { va: double(raw, 0), rkey: word(raw, 8), len: word(raw, 12) })
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; Reth::LEN] {
        let mut raw = [0; Reth::LEN];
        raw[..8].copy_from_slice(&self.va.to_be_bytes());
        raw[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        raw[12..].copy_from_slice(&self.len.to_be_bytes());
        raw
    }
}
