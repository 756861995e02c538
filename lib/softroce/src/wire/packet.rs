//! A whole packet: the headers that its opcode names, the payload, and the space of the ICRC.

use super::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Ieth, ImmDt, Opcode, Operation, Reth, Service};

/// Bytes of the ICRC behind the payload.
pub const ICRC_LEN: usize = 4;
/// The most bytes of headers: BTH and AtomicETH.
pub const MAX_HEADERS: usize = Bth::LEN + AtomicEth::LEN;

/// Reason why bytes are no packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Too short for its headers, padding and ICRC, or an unknown transport version or syndrome.
    #[error("truncated or malformed headers")]
    Headers,
    /// An opcode that no service here has.
    #[error("unknown opcode {0:#04x}")]
    Opcode(u8),
    /// Payload where the opcode has none.
    #[error("payload of {0} bytes with an opcode that carries none")]
    Payload(usize),
}

/// All headers of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers {
    /// Base transport header.
    pub bth: Bth,
    /// Sender and key of a datagram.
    pub deth: Option<Deth>,
    /// Remote memory.
    pub reth: Option<Reth>,
    /// Atomic operation.
    pub atomic: Option<AtomicEth>,
    /// Acknowledgement.
    pub aeth: Option<Aeth>,
    /// The word before an atomic operation.
    pub atomic_ack: Option<AtomicAckEth>,
    /// Immediate data.
    pub imm: Option<ImmDt>,
    /// Key to invalidate.
    pub ieth: Option<Ieth>,
}

impl Headers {
    /// A packet with a BTH alone.
    #[must_use]
    pub fn new(bth: Bth) -> Headers {
        Headers { bth, deth: None, reth: None, atomic: None, aeth: None, atomic_ack: None, imm: None, ieth: None }
    }

    /// Writes the headers to `into`, in the order of the wire; returns how many bytes.
    pub fn build(&self, into: &mut [u8; MAX_HEADERS]) -> usize {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            // Any two extended headers that go together fit: the opcode's table has no longer combination.
            if let Some(room) = into.get_mut(at..at + bytes.len()) {
                room.copy_from_slice(bytes);
                at += bytes.len();
            }
        };
        put(&self.bth.build());
        if let Some(h) = &self.deth {
            put(&h.build());
        }
        if let Some(h) = &self.reth {
            put(&h.build());
        }
        if let Some(h) = &self.atomic {
            put(&h.build());
        }
        if let Some(h) = &self.aeth {
            put(&h.build());
        }
        if let Some(h) = &self.atomic_ack {
            put(&h.build());
        }
        if let Some(h) = &self.imm {
            put(&h.build());
        }
        if let Some(h) = &self.ieth {
            put(&h.build());
        }
        at
    }
}

/// A packet that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The opcode, taken apart.
    pub opcode: Opcode,
    /// Its headers.
    pub headers: Headers,
    /// Payload without padding.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Takes the payload of a UDP datagram apart, ICRC included, which is not checked: see [`super::icrc`].
    ///
    /// # Errors
    /// The reason why the bytes are no packet of a service that is known here.
    pub fn parse(mut bytes: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        use ParseError::Headers as Malformed;
        let rest = &mut bytes;
        let bth = Bth::parse(rest).ok_or(Malformed)?;
        let opcode = Opcode::parse(bth.opcode).ok_or(ParseError::Opcode(bth.opcode))?;
        let mut headers = Headers::new(bth);
        if opcode.service == Service::Ud {
            headers.deth = Some(Deth::parse(rest).ok_or(Malformed)?);
        }
        if opcode.has_reth() {
            headers.reth = Some(Reth::parse(rest).ok_or(Malformed)?);
        }
        if opcode.has_atomic() {
            headers.atomic = Some(AtomicEth::parse(rest).ok_or(Malformed)?);
        }
        if opcode.has_aeth() {
            headers.aeth = Some(Aeth::parse(rest).ok_or(Malformed)?);
        }
        if opcode.operation == Operation::AtomicAck {
            headers.atomic_ack = Some(AtomicAckEth::parse(rest).ok_or(Malformed)?);
        }
        if opcode.has_imm() {
            headers.imm = Some(ImmDt::parse(rest).ok_or(Malformed)?);
        }
        if opcode.operation == Operation::SendInv {
            headers.ieth = Some(Ieth::parse(rest).ok_or(Malformed)?);
        }
        let behind = usize::from(bth.pad) + ICRC_LEN;
        let payload = bytes.len().checked_sub(behind).and_then(|n| bytes.get(..n)).ok_or(Malformed)?;
        if !opcode.has_payload() && !payload.is_empty() {
            return Err(ParseError::Payload(payload.len()));
        }
        Ok(Packet { opcode, headers, payload })
    }
}

/// The padding that `len` bytes of payload need.
#[must_use]
pub fn padding(len: usize) -> u8 {
    (len.wrapping_neg() & 3) as u8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Nak, Syndrome};
    use super::*;
    use crate::psn::Psn;

    fn headers() -> impl Strategy<Value = Headers> {
        let known = (0..=255u8).filter(|c| Opcode::parse(*c).is_some()).collect::<Vec<_>>();
        let syndrome = prop_oneof![
            (0..32u8).prop_map(Syndrome::Ack),
            (0..32u8).prop_map(Syndrome::Rnr),
            Just(Syndrome::Nak(Nak::RemoteAccess))
        ];
        let code = prop::sample::select(known);
        (code, any::<[u64; 4]>(), any::<(bool, bool, u16)>(), syndrome).prop_map(
            |(code, n, (se, ack, pkey), syndrome)| {
                let op = Opcode::parse(code).expect("known");
                let low = |n: u64| n as u32 & 0xff_ffff;
                let bth = Bth {
                    opcode: code,
                    solicited: se,
                    pad: 0,
                    pkey,
                    dest_qpn: low(n[0]),
                    ack_req: ack,
                    psn: Psn::new(n[1] as u32),
                };
                let (va, rkey) = (n[2], n[0] as u32);
                Headers {
                    deth: (op.service == Service::Ud).then_some(Deth { qkey: n[1] as u32, src_qpn: low(n[2]) }),
                    reth: op.has_reth().then_some(Reth { va, rkey, len: n[3] as u32 }),
                    atomic: op.has_atomic().then_some(AtomicEth { va, rkey, swap_or_add: n[1], compare: n[3] }),
                    aeth: op.has_aeth().then_some(Aeth { syndrome, msn: low(n[3]) }),
                    atomic_ack: (op.operation == Operation::AtomicAck).then_some(AtomicAckEth { original: n[3] }),
                    imm: op.has_imm().then_some(ImmDt((n[0] as u32).to_ne_bytes())),
                    ieth: (op.operation == Operation::SendInv).then_some(Ieth { rkey }),
                    ..Headers::new(bth)
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_built_is_parsed(mut headers in headers(), mut payload in prop::collection::vec(any::<u8>(), 0..70)) {
            let opcode = Opcode::parse(headers.bth.opcode).expect("known");
            if !opcode.has_payload() {
                payload.clear();
            }
            headers.bth.pad = padding(payload.len());
            let mut raw = [0; MAX_HEADERS];
            let n = headers.build(&mut raw);
            let mut bytes = raw[..n].to_vec();
            bytes.extend(&payload);
            bytes.resize(bytes.len() + usize::from(headers.bth.pad) + ICRC_LEN, 0);
            prop_assert_eq!(bytes.len() % 4, 0);
            prop_assert_eq!(Packet::parse(&bytes), Ok(Packet { opcode, headers, payload: &payload }));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(packet) = Packet::parse(&bytes) {
                prop_assert!(packet.payload.len() < bytes.len());
            }
        }
    }
}
