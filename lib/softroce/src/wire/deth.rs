//! Datagram extended transport header: a datagram's sender, and its key (InfiniBand specification, 9.3.1).

use super::{take, word};

/// Datagram extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deth {
    /// The key that the receiving queue pair must have.
    pub qkey: u32,
    /// The sender's queue pair, 24 bits.
    pub src_qpn: u32,
}

impl Deth {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    /// Takes the header from the front of `bytes`; `None` where they are too few.
    pub fn parse(bytes: &mut &[u8]) -> Option<Deth> {
        let raw: &[u8; Deth::LEN] = take(bytes)?;
        Some(Deth { qkey: word(raw, 0), src_qpn: word(raw, 4) & 0xff_ffff })
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; Deth::LEN] {
        let mut raw = [0; Deth::LEN];
        raw[..4].copy_from_slice(&self.qkey.to_be_bytes());
        raw[4..].copy_from_slice(&(self.src_qpn & 0xff_ffff).to_be_bytes());
        raw
    }
}
