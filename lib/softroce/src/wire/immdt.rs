//! Immediate data: four bytes that go into the receiver's completion (InfiniBand specification, 9.3.6).

use super::take;

/// Immediate data, as it lies on the wire. Verbs hands it over in network byte order, so no byte is swapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImmDt(pub [u8; 4]);

impl ImmDt {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Takes the header from the front of `bytes`; `None` where they are too few.
    pub fn parse(bytes: &mut &[u8]) -> Option<ImmDt> {
        take(bytes).map(|raw| ImmDt(*raw))
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; ImmDt::LEN] {
        self.0
    }
}
