//! ACK extended transport header: how a request went (InfiniBand specification, 9.3.5, 9.7.5.2).

use super::{take, word};

/// Reason why a responder refuses a request (table "NAK codes", 9.7.5.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nak {
    /// A packet is missing: the requester goes back to the PSN of the NAK.
    Sequence,
    /// An operation or length that this queue pair does not take.
    InvalidRequest,
    /// Address, length or rights do not fit the region of the key.
    RemoteAccess,
    /// The responder failed at its own end.
    RemoteOperational,
}

/// Outcome of a request, in an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syndrome {
    /// All up to the PSN arrived. The code is the credit count, [`NO_CREDITS`] where the responder does not count.
    Ack(u8),
    /// No receive was posted: wait for the time of the timer's code, then try again.
    Rnr(u8),
    /// Refused.
    Nak(Nak),
}

/// Credit code "invalid": the requester shall not limit itself by credits (9.7.7.2.1). Ours always sends it, as rxe
/// does.
pub const NO_CREDITS: u8 = 31;

/// ACK extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aeth {
    /// The outcome.
    pub syndrome: Syndrome,
    /// Message sequence number: messages completed by the responder, 24 bits.
    pub msn: u32,
}

impl Aeth {
    /// Bytes of the header.
    pub const LEN: usize = 4;

    /// Takes the header from the front of `bytes`; `None` where they are too few or the syndrome is a reserved one.
    pub fn parse(bytes: &mut &[u8]) -> Option<Aeth> {
        let raw: &[u8; Aeth::LEN] = take(bytes)?;
        let code = raw[0] & 0x1f;
        let syndrome = match (raw[0] >> 5 & 3, code) {
            (0, credits) => Syndrome::Ack(credits),
            (1, timer) => Syndrome::Rnr(timer),
            (3, 0) => Syndrome::Nak(Nak::Sequence),
            (3, 1) => Syndrome::Nak(Nak::InvalidRequest),
            (3, 2) => Syndrome::Nak(Nak::RemoteAccess),
            (3, 3) => Syndrome::Nak(Nak::RemoteOperational),
            _ => return None,
        };
        Some(Aeth { syndrome, msn: word(raw, 0) & 0xff_ffff })
    }

    /// The header as bytes.
    #[must_use]
    pub fn build(&self) -> [u8; Aeth::LEN] {
        let syndrome = match self.syndrome {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::Rnr(timer) => 1 << 5 | timer & 0x1f,
            Syndrome::Nak(nak) => {
                3 << 5
                    | match nak {
                        Nak::Sequence => 0,
                        Nak::InvalidRequest => 1,
                        Nak::RemoteAccess => 2,
                        Nak::RemoteOperational => 3,
                    }
            }
        };
        (u32::from(syndrome) << 24 | self.msn & 0xff_ffff).to_be_bytes()
    }
}

/// Waits for the codes 0 to 31 of an RNR timer, in units of 10 µs (table "Encoding for RNR NAK timer field",
/// 9.7.5.2.8).
const RNR_TENS_OF_MICROSECONDS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The wait that an RNR NAK with timer code `code` asks for, in nanoseconds.
#[must_use]
pub fn rnr_nanos(code: u8) -> u64 {
    u64::from(RNR_TENS_OF_MICROSECONDS[usize::from(code & 0x1f)]) * 10_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rnr_table_has_the_specifications_corners() {
        assert_eq!(rnr_nanos(0), 655_360_000);
        assert_eq!(rnr_nanos(1), 10_000);
        assert_eq!(rnr_nanos(12), 640_000);
        assert_eq!(rnr_nanos(31), 491_520_000);
    }

    #[test]
    fn reserved_syndromes_are_refused() {
        for first in 0..=255u8 {
            let parsed = Aeth::parse(&mut [first, 1, 2, 3].as_slice());
            let reserved = matches!(first >> 5 & 3, 2) || (first >> 5 & 3 == 3 && first & 0x1f > 3);
            assert_eq!(parsed.is_none(), reserved, "{first:#x}");
        }
    }
}
