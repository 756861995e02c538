//! Header of a fragment or a control frame.

use crate::rails::data::control::Kind;

/// A fragment's header or a control frame: 40 bytes, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::rails) struct Frame {
    pub(super) kind: u32,
    /// The tag; in a control frame about a stream or a queue pair, that
    /// ([`queue`](crate::rails::data::control::queue)).
    pub(in crate::rails) tag: i32,
    /// The message among those of its tag; a number of bytes or fragments, if it is about those.
    pub(in crate::rails) number: u64,
    /// Length of the message.
    pub(in crate::rails) total: u64,
    /// Offset of the fragment in its message, in bytes.
    pub(in crate::rails) offset: u64,
    /// Length of the fragment.
    pub(in crate::rails) len: u64,
}

const FRAGMENT: u32 = 0x7069_6563;

/// Encodes the immediate value of a fragment that goes by RDMA: the credit's id, the index of the fragment within its
/// message, and whether it is the last.
pub(in crate::rails) fn imm(id: u16, index: usize, last: bool) -> u32 {
    u32::from(id) & 0x7ff | u32::from(last) << 11 | (index as u32) << 12
}

/// Decodes an immediate value ([`imm`]): credit id, index of the fragment, whether it is the last.
pub(in crate::rails) fn read_imm(imm: u32) -> (u16, usize, bool) {
    ((imm & 0x7ff) as u16, (imm >> 12) as usize, imm & 1 << 11 != 0)
}

/// Longest message that is not cut into fragments.
pub(in crate::rails) const WHOLE: usize = 32 << 10;
/// Longest fragment that is copied behind its header, as one buffer costs the kernel less than two, and that is
/// acknowledged with others.
pub(in crate::rails) const COPIED: usize = 2 << 10;
/// Length of the fragments of a message that goes by RDMA, alike at both ends.
pub(in crate::rails) const RDMA_FRAGMENT: usize = 512 << 10;
/// Window charge of each fragment besides its bytes: empty messages are bounded, too.
const OVERHEAD: u64 = 64;

/// Charge of a fragment of `len` bytes against the window of its tag, in bytes.
pub(in crate::rails) fn charge(len: usize) -> u64 {
    len as u64 + OVERHEAD
}

impl Frame {
    pub(in crate::rails) const BYTES: usize = size_of::<Frame>();

    pub(in crate::rails) fn fragment(tag: i32, number: u64, total: usize, offset: usize, len: usize) -> Frame {
        Frame { kind: FRAGMENT, tag, number, total: total as u64, offset: offset as u64, len: len as u64 }
    }

    /// Parses the frame in `bytes`; an error says what is wrong with it.
    pub(in crate::rails) fn parse(bytes: &[u8]) -> Result<Frame, String> {
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
    use crate::rails::data::control::{Cts, QpInfo, queue};
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
