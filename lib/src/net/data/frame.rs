//! The header of a fragment, and control frames about fragments and streams.

/// A fragment's header or a control frame: 40 bytes, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::net) struct Frame {
    kind: u32,
    /// The tag; in a control frame about a stream or a queue pair, that ([`queue`]).
    pub(in crate::net) tag: i32,
    /// The message among those of its tag; a number of bytes or fragments, if it is about those.
    pub(in crate::net) number: u64,
    /// Length of the message.
    pub(in crate::net) total: u64,
    /// Offset of the fragment in its message, in bytes.
    pub(in crate::net) offset: u64,
    /// Length of the fragment.
    pub(in crate::net) len: u64,
}

const FRAGMENT: u32 = 0x7069_6563;

/// Kind of a control frame. Those from `Ack` to `Pong` are sent where several rails lead to the peer, the last ones
/// where fragments go by RDMA. There, `StreamFailed`, `Retire` and `RetireAck` are about queue pairs, too ([`queue`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(in crate::net) enum Kind {
    /// The receiver has placed `number` bytes of this tag.
    WindowUpdate = 0x706c_6163,
    /// The receiver has read `number` fragments from the stream that this comes over.
    Ack = 0x7265_6164,
    /// The receiver can read nothing from this stream.
    StreamFailed = 0x6c6f_7374,
    /// The sender writes nothing to this stream any more.
    Retire = 0x6c65_6674,
    /// The reply to `Retire`: the receiver has read `number` fragments from it.
    RetireAck = 0x6167_7265,
    /// The sender has this stream, which replaces a lost one.
    Join = 0x6a6f_696e,
    /// Probe for the other end of a relayed stream, which answers `Pong`.
    Ping = 0x6173_6b64,
    /// The reply to `Ping`, over the same stream.
    Pong = 0x6865_7265,
    /// One end's queue pair beside a stream ([`QpInfo`]).
    QpInfo = 0x6361_7264,
    /// Clear to send (CTS): the memory to which the peer may write a message ([`Cts`]).
    Cts = 0x726f_6f6d,
    /// The sender has a message of `total` bytes which waits for its CTS frame.
    Rts = 0x7761_6974,
}

impl Kind {
    const ALL: [Kind; 11] = {
        use Kind::{Ack, Cts, Join, Ping, Pong, QpInfo, Retire, RetireAck, Rts, StreamFailed, WindowUpdate};
        [WindowUpdate, Ack, StreamFailed, Retire, RetireAck, Join, Ping, Pong, QpInfo, Cts, Rts]
    };
}

/// Encodes queue pair `number` in a control frame's field for a stream's number.
pub(in crate::net) fn queue(number: usize) -> i32 {
    -1 - number as i32
}

/// A queue pair, as the peer's must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::net) struct QpInfo {
    /// The stream beside which it is, on the same NIC pair.
    pub(in crate::net) stream: usize,
    /// Its number among those of the connection.
    pub(in crate::net) queue: u8,
    /// Queue pair number; 0 if this end has no queue pair.
    pub(in crate::net) qpn: u32,
    pub(in crate::net) psn: u32,
    /// `ibv_mtu` code of its port.
    pub(in crate::net) mtu: u8,
    pub(in crate::net) gid: [u8; 16],
}

/// Clear to send (CTS): memory of a posted receive for one queue pair, or for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::net) struct Cts {
    pub(in crate::net) address: u64,
    pub(in crate::net) bytes: u64,
    /// The number by which the receiver knows it.
    pub(in crate::net) id: u16,
    /// The queue pair and the key for its device; `None`: the memory is not registered.
    pub(in crate::net) key: Option<(u8, u32)>,
}

/// Encodes the immediate value of a fragment that goes by RDMA: the credit's id, the index of the fragment within its
/// message, and whether it is the last.
pub(in crate::net) fn imm(id: u16, index: usize, last: bool) -> u32 {
    u32::from(id) & 0x7ff | u32::from(last) << 11 | (index as u32) << 12
}

/// Decodes an immediate value ([`imm`]): credit id, index of the fragment, whether it is the last.
pub(in crate::net) fn read_imm(imm: u32) -> (u16, usize, bool) {
    ((imm & 0x7ff) as u16, (imm >> 12) as usize, imm & 1 << 11 != 0)
}

/// Queue pair number in a CTS frame that has no key.
const NO_QUEUE: u64 = 0xff;

/// Window charge of each fragment besides its bytes: empty messages are bounded, too.
const OVERHEAD: u64 = 64;

/// Charge of a fragment of `len` bytes against the window of its tag, in bytes.
pub(in crate::net) fn charge(len: usize) -> u64 {
    len as u64 + OVERHEAD
}

impl Frame {
    pub(in crate::net) const BYTES: usize = size_of::<Frame>();

    pub(in crate::net) fn fragment(tag: i32, number: u64, total: usize, offset: usize, len: usize) -> Frame {
        Frame { kind: FRAGMENT, tag, number, total: total as u64, offset: offset as u64, len: len as u64 }
    }

    /// A control frame about a tag, a stream or a queue pair.
    pub(in crate::net) fn control(kind: Kind, about: i32, number: u64) -> Frame {
        Frame { kind: kind as u32, tag: about, number, total: 0, offset: 0, len: 0 }
    }

    pub(in crate::net) fn qp_info(info: &QpInfo) -> Frame {
        let QpInfo { stream, queue, qpn, psn, mtu, gid } = *info;
        let number = u64::from(qpn & 0xff_ffff)
            | u64::from(psn & 0xff_ffff) << 24
            | u64::from(mtu) << 48
            | u64::from(queue) << 56;
        let gid = u128::from_le_bytes(gid);
        let (total, offset) = (gid as u64, (gid >> 64) as u64);
        Frame { total, offset, ..Frame::control(Kind::QpInfo, stream as i32, number) }
    }

    pub(in crate::net) fn as_qp_info(&self) -> QpInfo {
        let part = |at: u32, bits: u32| (self.number >> at & ((1 << bits) - 1)) as u32;
        QpInfo {
            stream: self.stream(),
            queue: part(56, 8) as u8,
            qpn: part(0, 24),
            psn: part(24, 24),
            mtu: part(48, 8) as u8,
            gid: (u128::from(self.total) | u128::from(self.offset) << 64).to_le_bytes(),
        }
    }

    /// Clear to send (CTS) for the message `number` of a tag.
    pub(in crate::net) fn cts(tag: i32, number: u64, cts: &Cts) -> Frame {
        let Cts { address, bytes, id, key } = *cts;
        let (queue, key) = key.map_or((NO_QUEUE, 0), |(queue, key)| (u64::from(queue), key));
        let len = u64::from(key) | u64::from(id) << 32 | queue << 48;
        Frame { total: bytes, offset: address, len, ..Frame::control(Kind::Cts, tag, number) }
    }

    pub(in crate::net) fn as_cts(&self) -> Cts {
        let queue = self.len >> 48;
        let key = (queue < NO_QUEUE).then_some((queue as u8, self.len as u32));
        Cts { address: self.offset, bytes: self.total, id: (self.len >> 32) as u16, key }
    }

    /// Request for the CTS frame of a message of `total` bytes.
    pub(in crate::net) fn rts(tag: i32, number: u64, total: usize) -> Frame {
        Frame { total: total as u64, ..Frame::control(Kind::Rts, tag, number) }
    }

    /// Kind of the control frame; `None` for the header of a fragment.
    pub(in crate::net) fn kind(&self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == self.kind)
    }

    /// The queue pair that the control frame is about, if it is about one.
    pub(in crate::net) fn queue(&self) -> Option<usize> {
        usize::try_from(-1 - i64::from(self.tag)).ok()
    }

    /// The stream that the control frame is about; `usize::MAX` if it is about a queue pair.
    pub(in crate::net) fn stream(&self) -> usize {
        usize::try_from(self.tag).unwrap_or(usize::MAX)
    }

    /// Parses the frame in `bytes`; an error says what is wrong with it.
    pub(in crate::net) fn parse(bytes: &[u8]) -> Result<Frame, String> {
        let frame: Frame = bytemuck::try_pod_read_unaligned(bytes).map_err(|e| e.to_string())?;
        let whole = frame.offset.checked_add(frame.len).is_some_and(|end| end <= frame.total);
        let fits = usize::try_from(frame.total).is_ok_and(|total| isize::try_from(total).is_ok());
        match (frame.kind, frame.kind()) {
            (FRAGMENT, _) if whole && fits && (frame.len > 0 || frame.total == 0) => Ok(frame),
            (_, Some(kind)) if frame.len == 0 || kind == Kind::Cts => Ok(frame),
            _ => Err(format!("expected a fragment or a control frame, got {frame:x?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_survive_their_bytes() {
        for frame in [Frame::fragment(-3, 7, 100, 60, 40), Frame::fragment(0, 0, 0, 0, 0)] {
            assert_eq!(Frame::parse(bytemuck::bytes_of(&frame)), Ok(frame));
            assert_eq!(frame.kind(), None);
        }
        for kind in Kind::ALL {
            let frame = Frame::parse(bytemuck::bytes_of(&Frame::control(kind, 1, 1 << 40))).unwrap();
            assert_eq!((frame.kind(), frame.stream(), frame.number), (Some(kind), 1, 1 << 40));
        }
        let info = QpInfo {
            stream: 2,
            queue: 7,
            qpn: 0xfe_dcba,
            psn: 0xab_cdef,
            mtu: 5,
            gid: std::array::from_fn(|i| i as u8),
        };
        assert_eq!(Frame::parse(bytemuck::bytes_of(&Frame::qp_info(&info))).unwrap().as_qp_info(), info);
        for key in [None, Some((0, 0)), Some((63, u32::MAX))] {
            let cts = Cts { address: u64::MAX - 1, bytes: 5 << 40, id: 2047, key };
            let frame = Frame::parse(bytemuck::bytes_of(&Frame::cts(-9, 1 << 50, &cts))).unwrap();
            assert_eq!((frame.as_cts(), frame.tag, frame.number), (cts, -9, 1 << 50));
        }
        assert_eq!([0, 5].map(|number| Frame::control(Kind::Retire, queue(number), 0).queue()), [Some(0), Some(5)]);
        assert_eq!(Frame::control(Kind::Retire, 0, 0).queue(), None);
        for wrong in
            [Frame::fragment(0, 0, 10, 8, 4), Frame::fragment(0, 0, 10, 0, 0), Frame::fragment(0, 0, usize::MAX, 0, 1)]
        {
            assert!(Frame::parse(bytemuck::bytes_of(&wrong)).is_err(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn a_parsed_fragment_lies_within_its_message(mut bytes in proptest::array::uniform(any::<u8>()), fragment: bool) {
            let _: &[u8; Frame::BYTES] = &bytes;
            if fragment {
                bytes[..4].copy_from_slice(&FRAGMENT.to_le_bytes());
            }
            if let Ok(frame) = Frame::parse(&bytes) {
                prop_assert!(frame.kind().is_some() || frame.offset + frame.len <= frame.total);
            }
        }
    }
}
