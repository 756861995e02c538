//! The wire format of RoCEv2: one file per header, each with its parser and its builder.
//!
//! Source: InfiniBand Architecture Specification, volume 1, chapter 9 ("Transport layer"), and its annex A17
//! ("RoCEv2"). All fields are big-endian but the ICRC.
//!
//! A packet is what UDP carries to port 4791:
//!
//! ```text
//! | BTH 12 | DETH 8 | RETH 16 | AtomicETH 28 | AETH 4 | AtomicAckETH 8 | ImmDt 4 | IETH 4 | payload | ICRC 4 |
//!           '---------------- which of these there are, the opcode says ----------------'  padded to 4
//! ```

pub mod aeth;
pub mod atomic;
pub mod bth;
pub mod deth;
pub mod grh;
pub mod icrc;
pub mod ieth;
pub mod immdt;
pub mod opcode;
pub mod packet;
pub mod reth;

pub use aeth::{Aeth, Nak, Syndrome};
pub use atomic::{AtomicAckEth, AtomicEth};
pub use bth::Bth;
pub use deth::Deth;
pub use ieth::Ieth;
pub use immdt::ImmDt;
pub use opcode::{Opcode, Operation, Position, Service};
pub use packet::{Headers, Packet, ParseError};
pub use reth::Reth;

/// UDP port of RoCEv2 (annex A17.3.1, registered with IANA).
pub const UDP_PORT: u16 = 4791;

/// Splits the first `N` bytes off.
fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(head)
}

/// Reads a big-endian 32-bit word at `at`. A caller passes an offset within its header's fixed array.
fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_be_bytes(*b))
}

/// As [`word`], of 64 bits.
fn double(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_be_bytes(*b))
}
