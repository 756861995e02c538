//! The header of a fragment, and control frames about fragments and streams.

/// A fragment's header or a control frame: 40 bytes, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Frame {
    kind: u32,
    /// The tag; in a control frame about a stream or a queue pair, that ([`queue`]).
    pub(super) tag: i32,
    /// The message among those of its tag; a number of bytes or fragments, if it is about those.
    pub(super) number: u64,
    /// Length of the message.
    pub(super) total: u64,
    /// Offset of the fragment in its message, in bytes.
    pub(super) offset: u64,
    /// Length of the fragment.
    pub(super) len: u64,
}

const PIECE: u32 = 0x7069_6563;

/// Kind of a control frame. Those from `Read` to `Here` are sent where several rails lead to the peer, the last ones
/// where fragments go by RDMA. There, `Lost`, `Left` and `Agreed` are about queue pairs, too ([`queue`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Word {
    /// The receiver has placed `number` bytes of this tag.
    Placed = 0x706c_6163,
    /// The receiver has read `number` fragments from the stream that this comes over.
    Read = 0x7265_6164,
    /// The receiver can read nothing from this stream.
    Lost = 0x6c6f_7374,
    /// The sender writes nothing to this stream any more.
    Left = 0x6c65_6674,
    /// The reply to `Left`: the receiver has read `number` fragments from it.
    Agreed = 0x6167_7265,
    /// The sender has this stream, which replaces a lost one.
    Joined = 0x6a6f_696e,
    /// Probe for the other end of a relayed stream, which answers `Here`.
    Asked = 0x6173_6b64,
    /// The reply to `Asked`, over the same stream.
    Here = 0x6865_7265,
    /// One end's queue pair beside a stream ([`Card`]).
    Card = 0x6361_7264,
    /// Receive credit: the memory to which the peer may write a message ([`Room`]).
    Room = 0x726f_6f6d,
    /// The sender has a message of `total` bytes which waits for its receive credit.
    Waits = 0x7761_6974,
}

impl Word {
    const ALL: [Word; 11] = {
        use Word::{Agreed, Asked, Card, Here, Joined, Left, Lost, Placed, Read, Room, Waits};
        [Placed, Read, Lost, Left, Agreed, Joined, Asked, Here, Card, Room, Waits]
    };
}

/// Encodes queue pair `number` in a control frame's field for a stream's number.
pub(super) fn queue(number: usize) -> i32 {
    -1 - number as i32
}

/// A queue pair, as the peer's must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Card {
    /// The stream beside which it is, on the same NIC pair.
    pub(super) stream: usize,
    /// Its number among those of the link.
    pub(super) queue: u8,
    /// Queue pair number; 0 if this end has no queue pair.
    pub(super) qpn: u32,
    pub(super) psn: u32,
    /// `ibv_mtu` code of its port.
    pub(super) mtu: u8,
    pub(super) gid: [u8; 16],
}

/// Receive credit: memory of a posted receive for one queue pair, or for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// The number by which the receiver knows it.
    pub(super) id: u16,
    /// The queue pair and the key for its device; `None`: the memory is not registered.
    pub(super) key: Option<(u8, u32)>,
}

/// Encodes the immediate value of a fragment that goes by RDMA: the credit's id, the index of the fragment within its
/// message, and whether it is the last.
pub(super) fn imm(id: u16, index: usize, last: bool) -> u32 {
    u32::from(id) & 0x7ff | u32::from(last) << 11 | (index as u32) << 12
}

/// Decodes an immediate value ([`imm`]): credit id, index of the fragment, whether it is the last.
pub(super) fn read_imm(word: u32) -> (u16, usize, bool) {
    ((word & 0x7ff) as u16, (word >> 12) as usize, word & 1 << 11 != 0)
}

/// Queue pair number in a receive credit that has no key.
const NO_QUEUE: u64 = 0xff;

/// Window charge of each fragment besides its bytes: empty messages are bounded, too.
const OVERHEAD: u64 = 64;

/// Charge of a fragment of `len` bytes against the window of its tag, in bytes.
pub(super) fn charge(len: usize) -> u64 {
    len as u64 + OVERHEAD
}

impl Frame {
    pub(super) const BYTES: usize = size_of::<Frame>();

    pub(super) fn piece(tag: i32, number: u64, total: usize, offset: usize, len: usize) -> Frame {
        Frame { kind: PIECE, tag, number, total: total as u64, offset: offset as u64, len: len as u64 }
    }

    /// A control frame about a tag, a stream or a queue pair.
    pub(super) fn say(word: Word, about: i32, number: u64) -> Frame {
        Frame { kind: word as u32, tag: about, number, total: 0, offset: 0, len: 0 }
    }

    pub(super) fn card(card: &Card) -> Frame {
        let Card { stream, queue, qpn, psn, mtu, gid } = *card;
        let number = u64::from(qpn & 0xff_ffff)
            | u64::from(psn & 0xff_ffff) << 24
            | u64::from(mtu) << 48
            | u64::from(queue) << 56;
        let gid = u128::from_le_bytes(gid);
        let (total, offset) = (gid as u64, (gid >> 64) as u64);
        Frame { total, offset, ..Frame::say(Word::Card, stream as i32, number) }
    }

    pub(super) fn as_card(&self) -> Card {
        let part = |at: u32, bits: u32| (self.number >> at & ((1 << bits) - 1)) as u32;
        Card {
            stream: self.stream(),
            queue: part(56, 8) as u8,
            qpn: part(0, 24),
            psn: part(24, 24),
            mtu: part(48, 8) as u8,
            gid: (u128::from(self.total) | u128::from(self.offset) << 64).to_le_bytes(),
        }
    }

    /// Receive credit for the message `number` of a tag.
    pub(super) fn room(tag: i32, number: u64, room: &Room) -> Frame {
        let Room { address, bytes, id, key } = *room;
        let (queue, key) = key.map_or((NO_QUEUE, 0), |(queue, key)| (u64::from(queue), key));
        let len = u64::from(key) | u64::from(id) << 32 | queue << 48;
        Frame { total: bytes, offset: address, len, ..Frame::say(Word::Room, tag, number) }
    }

    pub(super) fn as_room(&self) -> Room {
        let queue = self.len >> 48;
        let key = (queue < NO_QUEUE).then_some((queue as u8, self.len as u32));
        Room { address: self.offset, bytes: self.total, id: (self.len >> 32) as u16, key }
    }

    /// Request for the receive credit of a message of `total` bytes.
    pub(super) fn waits(tag: i32, number: u64, total: usize) -> Frame {
        Frame { total: total as u64, ..Frame::say(Word::Waits, tag, number) }
    }

    /// Kind of the control frame; `None` for the header of a fragment.
    pub(super) fn word(&self) -> Option<Word> {
        Word::ALL.into_iter().find(|word| *word as u32 == self.kind)
    }

    /// The queue pair that the control frame is about, if it is about one.
    pub(super) fn queue(&self) -> Option<usize> {
        usize::try_from(-1 - i64::from(self.tag)).ok()
    }

    /// The stream that the control frame is about; `usize::MAX` if it is about a queue pair.
    pub(super) fn stream(&self) -> usize {
        usize::try_from(self.tag).unwrap_or(usize::MAX)
    }

    /// Parses the frame in `bytes`; an error says what is wrong with it.
    pub(super) fn parse(bytes: &[u8]) -> Result<Frame, String> {
        let frame: Frame = bytemuck::try_pod_read_unaligned(bytes).map_err(|e| e.to_string())?;
        let whole = frame.offset.checked_add(frame.len).is_some_and(|end| end <= frame.total);
        let fits = usize::try_from(frame.total).is_ok_and(|total| isize::try_from(total).is_ok());
        match (frame.kind, frame.word()) {
            (PIECE, _) if whole && fits && (frame.len > 0 || frame.total == 0) => Ok(frame),
            (_, Some(word)) if frame.len == 0 || word == Word::Room => Ok(frame),
            _ => Err(format!("expected a piece of a message or a word on pieces, got {frame:x?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_survive_their_bytes() {
        for frame in [Frame::piece(-3, 7, 100, 60, 40), Frame::piece(0, 0, 0, 0, 0)] {
            assert_eq!(Frame::parse(bytemuck::bytes_of(&frame)), Ok(frame));
            assert_eq!(frame.word(), None);
        }
        for word in Word::ALL {
            let frame = Frame::parse(bytemuck::bytes_of(&Frame::say(word, 1, 1 << 40))).unwrap();
            assert_eq!((frame.word(), frame.stream(), frame.number), (Some(word), 1, 1 << 40));
        }
        let card =
            Card { stream: 2, queue: 7, qpn: 0xfe_dcba, psn: 0xab_cdef, mtu: 5, gid: std::array::from_fn(|i| i as u8) };
        assert_eq!(Frame::parse(bytemuck::bytes_of(&Frame::card(&card))).unwrap().as_card(), card);
        for key in [None, Some((0, 0)), Some((63, u32::MAX))] {
            let room = Room { address: u64::MAX - 1, bytes: 5 << 40, id: 2047, key };
            let frame = Frame::parse(bytemuck::bytes_of(&Frame::room(-9, 1 << 50, &room))).unwrap();
            assert_eq!((frame.as_room(), frame.tag, frame.number), (room, -9, 1 << 50));
        }
        assert_eq!([0, 5].map(|number| Frame::say(Word::Left, queue(number), 0).queue()), [Some(0), Some(5)]);
        assert_eq!(Frame::say(Word::Left, 0, 0).queue(), None);
        for wrong in [Frame::piece(0, 0, 10, 8, 4), Frame::piece(0, 0, 10, 0, 0), Frame::piece(0, 0, usize::MAX, 0, 1)]
        {
            assert!(Frame::parse(bytemuck::bytes_of(&wrong)).is_err(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn a_parsed_piece_lies_within_its_message(mut bytes in proptest::array::uniform(any::<u8>()), piece: bool) {
            let _: &[u8; Frame::BYTES] = &bytes;
            if piece {
                bytes[..4].copy_from_slice(&PIECE.to_le_bytes());
            }
            if let Ok(frame) = Frame::parse(&bytes) {
                prop_assert!(frame.word().is_some() || frame.offset + frame.len <= frame.total);
            }
        }
    }
}
