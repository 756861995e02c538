//! The bytes before a piece, and those that say what became of pieces and streams.

/// 40 bytes, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Frame {
    kind: u32,
    /// The tag; the stream, if it is about one.
    pub(super) tag: i32,
    /// The message among those of its tag; a number of bytes or pieces, if it is about those.
    pub(super) number: u64,
    /// Length of the message.
    pub(super) total: u64,
    /// Where in the message the piece belongs.
    pub(super) offset: u64,
    /// Length of the piece.
    pub(super) len: u64,
}

const PIECE: u32 = 0x7069_6563;

/// What a frame without a piece says. All but the first are said where several rails lead to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Word {
    /// The receiver has placed so many bytes of this tag.
    Placed = 0x706c_6163,
    /// The receiver has read so many pieces from the stream that this comes over.
    Read = 0x7265_6164,
    /// The receiver can read nothing from this stream.
    Lost = 0x6c6f_7374,
    /// The sender writes nothing to this stream any more.
    Left = 0x6c65_6674,
    /// The answer to that: the receiver has read so many pieces from it.
    Agreed = 0x6167_7265,
    /// The sender has this stream, which takes the place of a lost one.
    Joined = 0x6a6f_696e,
    /// Whether anybody hears this at the other end of a relayed stream.
    Asked = 0x6173_6b64,
    /// The answer, over the same stream.
    Here = 0x6865_7265,
}

impl Word {
    const ALL: [Word; 8] = {
        use Word::{Agreed, Asked, Here, Joined, Left, Lost, Placed, Read};
        [Placed, Read, Lost, Left, Agreed, Joined, Asked, Here]
    };
}

/// What a piece counts for besides its bytes: empty messages are bounded, too.
const OVERHEAD: u64 = 64;

/// What a piece of `len` bytes counts for in the window of its tag.
pub(super) fn charge(len: usize) -> u64 {
    len as u64 + OVERHEAD
}

impl Frame {
    pub(super) const BYTES: usize = size_of::<Frame>();

    pub(super) fn piece(tag: i32, number: u64, total: usize, offset: usize, len: usize) -> Frame {
        Frame { kind: PIECE, tag, number, total: total as u64, offset: offset as u64, len: len as u64 }
    }

    /// A frame without a piece, about a tag or a stream.
    pub(super) fn say(word: Word, about: i32, number: u64) -> Frame {
        Frame { kind: word as u32, tag: about, number, total: 0, offset: 0, len: 0 }
    }

    /// What it says; nothing before a piece.
    pub(super) fn word(&self) -> Option<Word> {
        Word::ALL.into_iter().find(|word| *word as u32 == self.kind)
    }

    /// The stream that it is about.
    pub(super) fn stream(&self) -> usize {
        usize::try_from(self.tag).unwrap_or(usize::MAX)
    }

    /// The frame in `bytes`; an error says what makes no sense.
    pub(super) fn parse(bytes: &[u8]) -> Result<Frame, String> {
        let frame: Frame = bytemuck::try_pod_read_unaligned(bytes).map_err(|e| e.to_string())?;
        let whole = frame.offset.checked_add(frame.len).is_some_and(|end| end <= frame.total);
        let fits = usize::try_from(frame.total).is_ok_and(|total| isize::try_from(total).is_ok());
        match (frame.kind, frame.word()) {
            (PIECE, _) if whole && fits && (frame.len > 0 || frame.total == 0) => Ok(frame),
            (_, Some(_)) if frame.len == 0 => Ok(frame),
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
                prop_assert!(frame.offset + frame.len <= frame.total || frame.word().is_some());
            }
        }
    }
}
