//! Base transport header: the first twelve bytes of every packet (InfiniBand specification, 9.2).

use super::{take, word};
use crate::psn::Psn;

/// The partition key of every packet here: the default partition, full membership (10.9.1.2).
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Returns true if a packet with this key is for the default partition: full members take packets of all its members
/// (10.9.3).
#[must_use]
pub(crate) fn is_of_our_partition(pkey: u16) -> bool {
    pkey & 0x7fff == DEFAULT_PKEY & 0x7fff
}

/// Base transport header.
///
/// ```text
///  0            1                          2              3
/// | opcode 8   | SE 1 | M 1 | pad 2 | TVer 4 | P_Key 16              |
/// | resv8a 8 (FECN, BECN in RoCEv2) | destination queue pair 24      |
/// | A 1, reserved 7 | packet sequence number 24                      |
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bth {
    /// Service, operation and position of the packet, see [`super::Opcode`].
    pub opcode: u8,
    /// True for a solicited event: the receiver's completion wakes also threads that wait for solicited ones only.
    pub solicited: bool,
    /// Bytes of padding behind the payload, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// Destination queue pair, 24 bits.
    pub dest_qpn: u32,
    /// True if the responder shall acknowledge.
    pub ack_req: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes of the header.
    pub const LEN: usize = 12;

    /// Takes the header from the front of `bytes`; `None` where they are too few. The migration bit and the congestion
    /// bits are not looked at; `None` also for a transport version other than 0.
    pub fn parse(bytes: &mut &[u8]) -> Option<Bth> {
        let raw: &[u8; Bth::LEN] = take(bytes)?;
        let [opcode, flags, pkey_high, pkey_low, _, _, _, _, ack, ..] = *raw;
        (flags & 0x0f == 0).then(|| Bth {
            opcode,
            solicited: flags & 0x80 != 0,
            pad: flags >> 4 & 3,
            pkey: u16::from_be_bytes([pkey_high, pkey_low]),
            dest_qpn: word(raw, 4) & 0xff_ffff,
            ack_req: ack & 0x80 != 0,
            psn: Psn::new(word(raw, 8)),
        })
    }

    /// The destination queue pair of a packet that begins with this header, which is looked at before the ICRC is
    /// checked; `None` where the bytes are too few.
    pub(crate) fn dest_qpn_of(packet: &[u8]) -> Option<u32> {
        packet.get(..8).map(|raw| word(raw, 4) & 0xff_ffff)
    }

    /// The header as bytes. The migration bit is set, as adapters without path migration send it (17.2.8).
    #[must_use]
    pub fn build(&self) -> [u8; Bth::LEN] {
        let mut raw = [0; Bth::LEN];
        raw[0] = self.opcode;
        raw[1] = u8::from(self.solicited) << 7 | 1 << 6 | (self.pad & 3) << 4;
        raw[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        raw[4..8].copy_from_slice(&(self.dest_qpn & 0xff_ffff).to_be_bytes());
        raw[8..12].copy_from_slice(&(u32::from(self.ack_req) << 31 | self.psn.get()).to_be_bytes());
        raw
    }
}
