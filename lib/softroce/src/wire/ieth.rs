//! Invalidate extended transport header: the key that the receiver gives up (InfiniBand specification, 9.3.7).

use super::{take, word};

/// Invalidate extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ieth {
    /// Remote key to invalidate.
    pub rkey: u32,
}

impl Ieth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Takes the header from the front of `bytes`; `None` where they are too few.
    pub fn parse(bytes: &mut &[u8]) -> Option<Ieth> {
        let raw: &[u8; Ieth::LEN] = take(bytes)?;
        Some(Ieth { rkey: word(raw, 0) })
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; Ieth::LEN] {
        self.rkey.to_be_bytes()
    }
}
