//! Frames on a byte stream: a 32-byte [`Header`], then `len` bytes of payload. Here without any I/O.

use std::collections::VecDeque;

use crate::memory::mapping::Mapping;
use crate::tcp::stripes::Stripes;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// Bytes that are read ahead of the message that is wanted.
///
/// A read takes the missing payload straight to where it belongs and whatever follows to here, so that in a stream of
/// messages each costs one system call, and a small one comes whole with its header.
pub(super) const AHEAD: usize = 4096;

/// Bytes that a read takes at most where they are combined with others at once, from here: in the L2 cache they are
/// still there when they are read again.
pub(super) const CHUNK: usize = (64 << 10) + AHEAD;

/// Borders within a message that is taken chunk by chunk lie on multiples of it.
const GRAIN: usize = 64;

/// Memory for one message: its own mapping, so that it is zeroed for free and only touched pages cost anything.
#[derive(Debug)]
pub(super) struct Slot(Mapping);

impl Slot {
    pub(super) fn new(len: usize) -> Result<Slot> {
        Ok(Slot(Mapping::anonymous(len)?))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is ours alone, zeroed at first, and `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.0.base().as_ptr(), self.0.len()) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, with `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.0.base().as_ptr(), self.0.len()) }
    }
}

/// A message in a slot; a message without payload needs none.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) header: Header,
    pub(super) slot: Option<Slot>,
}

impl Staged {
    pub(super) fn payload(&self) -> &[u8] {
        let bytes = self.slot.as_ref().map_or(&[][..], |s| s.bytes());
        bytes.get(..self.header.len as usize).unwrap_or_default()
    }
}

/// A header that promises more than a message may hold.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong(pub(super) Header);

/// Data that has come from the stream and was not asked for yet: whole messages, at most one unfinished, and a few
/// bytes ahead.
#[derive(Debug)]
pub(super) struct Inbox {
    max_message: usize,
    depth: usize,
    ahead: Slot,
    start: usize,
    end: usize,
    /// Whole messages, oldest first.
    pub(super) ready: VecDeque<Staged>,
    /// The unfinished message, and how much of its first stripe is here.
    partial: Option<(Staged, usize)>,
    /// Progress of the other stripes: of this message, or of the one that goes straight to the caller.
    pub(super) stripes: Stripes,
    free: Vec<Slot>,
}

impl Inbox {
    pub(super) fn new(max_message: usize, depth: usize, streams: usize) -> Result<Inbox> {
        Ok(Inbox {
            max_message,
            depth,
            ahead: Slot::new(CHUNK)?,
            start: 0,
            end: 0,
            ready: VecDeque::new(),
            partial: None,
            stripes: Stripes::new(streams),
            free: Vec::new(),
        })
    }

    /// All slots are taken: nothing more is to be read.
    pub(super) fn is_full(&self) -> bool {
        self.partial.is_none() && self.ready.len() >= self.depth
    }

    /// Moves the bytes ahead to the front.
    fn compact(&mut self) {
        self.ahead.bytes_mut().copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }

    /// Returns the space for the next bytes: the rest of the unfinished message, then ahead, so that at most `limit`
    /// are ahead. Call [`Inbox::digest`] before.
    pub(super) fn space(&mut self, limit: usize) -> (&mut [u8], &mut [u8]) {
        self.compact();
        let rest: &mut [u8] = match &mut self.partial {
            Some((Staged { header, slot: Some(slot) }, got)) => {
                slot.bytes_mut().get_mut(*got..self.stripes.first(header.len as usize)).unwrap_or_default()
            }
            _ => &mut [],
        };
        let limit = limit.clamp(AHEAD, CHUNK);
        (rest, self.ahead.bytes_mut().get_mut(self.end..limit).unwrap_or_default())
    }

    /// `n` bytes were put into [`Inbox::space`].
    pub(super) fn filled(&mut self, mut n: usize) {
        if let Some((staged, got)) = &mut self.partial {
            let here = n.min(self.stripes.first(staged.header.len as usize) - *got);
            *got += here;
            n -= here;
        }
        self.end = (self.end + n).min(CHUNK);
    }

    /// Takes the next header off the bytes ahead, if it is there and no message is unfinished.
    pub(super) fn header(&mut self) -> Result<Option<Header>, TooLong> {
        if self.partial.is_some() {
            return Ok(None);
        }
        let ahead = self.ahead.bytes().get(self.start..self.end).unwrap_or_default();
        let Some(bytes) = ahead.get(..Header::BYTES) else { return Ok(None) };
        let header: Header = bytemuck::pod_read_unaligned(bytes);
        if header.len as usize > self.max_message {
            return Err(TooLong(header));
        }
        self.start += Header::BYTES;
        self.stripes.reset();
        Ok(Some(header))
    }

    /// A header is here whose message has not been begun.
    pub(super) fn has_header(&self) -> bool {
        self.partial.is_none() && self.end - self.start >= Header::BYTES
    }

    /// Moves bytes ahead to `dst`, and says how many.
    pub(super) fn take(&mut self, dst: &mut [u8]) -> usize {
        let n = dst.len().min(self.end - self.start);
        if let (Some(to), Some(from)) = (dst.get_mut(..n), self.ahead.bytes().get(self.start..self.start + n)) {
            to.copy_from_slice(from);
        }
        self.start += n;
        n
    }

    /// Gives bytes ahead to `sink`, as the bytes of a message of `len` bytes from `got` on; says how many.
    pub(super) fn pass(&mut self, got: usize, len: usize, sink: &mut dyn FnMut(usize, &[u8])) -> usize {
        if !self.start.is_multiple_of(8) {
            self.compact();
        }
        let here = (self.end - self.start).min(len - got);
        let whole = if got + here == len { here } else { here - here % GRAIN };
        if whole > 0 {
            sink(got, self.ahead.bytes().get(self.start..self.start + whole).unwrap_or_default());
            self.start += whole;
        }
        whole
    }

    /// Starts a message in a slot. One must be free.
    pub(super) fn begin(&mut self, header: Header) -> Result<()> {
        let slot = match self.free.pop() {
            _ if header.len == 0 => None,
            Some(slot) => Some(slot),
            None => Some(Slot::new(self.max_message)?),
        };
        self.partial = Some((Staged { header, slot }, 0));
        Ok(())
    }

    /// Puts bytes ahead into the unfinished message, and moves it to the whole ones when it is.
    pub(super) fn advance(&mut self) {
        let Some((mut staged, mut got)) = self.partial.take() else { return };
        let len = staged.header.len as usize;
        let first = self.stripes.first(len);
        if let Some(slot) = &mut staged.slot
            && let Some(rest) = slot.bytes_mut().get_mut(got..first)
        {
            got += self.take(rest);
        }
        if got == first && self.stripes.unfinished(len).is_none() {
            self.ready.push_back(staged);
        } else {
            self.partial = Some((staged, got));
        }
    }

    /// Returns the space in which stream `stream`, not the first, goes on with the unfinished message.
    pub(super) fn stripe(&mut self, stream: usize) -> &mut [u8] {
        match &mut self.partial {
            Some((Staged { header, slot: Some(slot) }, _)) => {
                slot.bytes_mut().get_mut(self.stripes.rest(header.len as usize, stream)).unwrap_or_default()
            }
            _ => &mut [],
        }
    }

    /// The stream that the unfinished message waits for, and how many it goes over.
    pub(super) fn waits_for(&self) -> (usize, usize) {
        match &self.partial {
            Some((Staged { header, .. }, got)) => {
                let len = header.len as usize;
                let first = *got < self.stripes.first(len);
                (if first { 0 } else { self.stripes.unfinished(len).unwrap_or(0) }, self.stripes.count(len))
            }
            None => (0, 1),
        }
    }

    /// Makes messages of the bytes ahead while there are slots. True when one became whole.
    pub(super) fn digest(&mut self) -> Result<Result<bool, TooLong>> {
        let before = self.ready.len();
        self.advance();
        while self.partial.is_none() && self.ready.len() < self.depth {
            match self.header() {
                Ok(Some(header)) => self.begin(header)?,
                Ok(None) => break,
                Err(e) => return Ok(Err(e)),
            }
            self.advance();
        }
        Ok(Ok(self.ready.len() > before))
    }

    /// The header of the unfinished message, when it is the oldest.
    pub(super) fn unfinished(&self) -> Option<Header> {
        self.partial.as_ref().filter(|_| self.ready.is_empty()).map(|(staged, _)| staged.header)
    }

    /// Moves the unfinished message to the caller's memory, of its length; returns how much of it is there.
    pub(super) fn hand_over(&mut self, dst: &mut [u8]) -> usize {
        let Some((staged, got)) = self.partial.take() else { return 0 };
        if let (Some(to), Some(from)) = (dst.get_mut(..got), staged.payload().get(..got)) {
            to.copy_from_slice(from);
        }
        self.free.extend(staged.slot);
        got
    }

    /// Frees the oldest whole message.
    pub(super) fn pop(&mut self) -> Option<Header> {
        let staged = self.ready.pop_front()?;
        self.free.extend(staged.slot);
        Some(staged.header)
    }

    /// In words, what is missing when the stream ends here.
    pub(super) fn cut_off(&self) -> Option<String> {
        match &self.partial {
            Some((staged, got)) => Some(format!("after {got} of {} bytes of a message", staged.header.len)),
            None if self.end > self.start => Some("within a header".to_owned()),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX: usize = 9000;
    const DEPTH: usize = 3;

    fn message(seq: u32, len: usize) -> (Header, Vec<u8>) {
        let payload = (0..len).map(|i| (i as u32).wrapping_mul(31).wrapping_add(seq) as u8).collect();
        (Header { seq, len: len as u32, ..Header::default() }, payload)
    }

    /// Puts as many bytes in as there is space for, at most `most`.
    fn feed(inbox: &mut Inbox, bytes: &[u8], most: usize) -> usize {
        let (rest, ahead) = inbox.space(AHEAD);
        let n = bytes.len().min(most).min(rest.len() + ahead.len());
        let first = n.min(rest.len());
        rest[..first].copy_from_slice(&bytes[..first]);
        ahead[..n - first].copy_from_slice(&bytes[first..n]);
        inbox.filled(n);
        n
    }

    proptest! {
        /// However the stream is cut, and however messages are taken, they come out whole, in order, within the bound.
        #[test]
        fn any_cutting_gives_the_same_messages(
            lens in proptest::collection::vec(prop_oneof![Just(0usize), 1..40usize, 0..MAX], 1..20),
            cuts in proptest::collection::vec((1usize..6000, 0u8..3), 1..40),
        ) {
            let messages: Vec<_> = lens.iter().enumerate().map(|(i, &l)| message(i as u32, l)).collect();
            let mut stream = Vec::new();
            for (header, payload) in &messages {
                stream.extend_from_slice(bytemuck::bytes_of(header));
                stream.extend_from_slice(payload);
            }
            let (mut inbox, mut at, mut out) = (Inbox::new(MAX, DEPTH, 1).unwrap(), 0, 0);
            for (cut, action) in cuts.iter().chain([&(5000, 1)]).cycle().take(100_000) {
                if out == messages.len() {
                    break;
                }
                if !inbox.is_full() {
                    at += feed(&mut inbox, &stream[at..], *cut);
                }
                inbox.digest().unwrap().unwrap();
                prop_assert!(inbox.ready.len() + usize::from(inbox.partial.is_some()) <= DEPTH);
                let (header, payload) = &messages[out];
                if let Some(staged) = inbox.ready.front() {
                    prop_assert_eq!(staged.header, *header);
                    prop_assert_eq!(staged.payload(), &payload[..]);
                    if *action > 0 || inbox.is_full() {
                        inbox.pop();
                        out += 1;
                    }
                } else if let Some(unfinished) = inbox.unfinished().filter(|_| *action == 2) {
                    // The receiver asks for it before it is whole.
                    prop_assert_eq!(unfinished, *header);
                    let mut dst = vec![0; payload.len()];
                    let mut got = inbox.hand_over(&mut dst);
                    got += inbox.take(&mut dst[got..]);
                    while got < dst.len() {
                        dst[got] = stream[at];
                        (got, at) = (got + 1, at + 1);
                    }
                    prop_assert_eq!(&dst, payload);
                    out += 1;
                }
            }
            prop_assert_eq!(out, messages.len());
            prop_assert_eq!(at, stream.len());
            prop_assert_eq!(inbox.cut_off(), None);
        }

        /// Garbage is an error or an unfinished message, never a panic and never more memory than the bound.
        #[test]
        fn garbage_is_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..4000)) {
            let mut inbox = Inbox::new(MAX, DEPTH, 1).unwrap();
            let n = feed(&mut inbox, &bytes, bytes.len());
            prop_assert_eq!(n, bytes.len());
            if let Ok(Err(TooLong(header))) = inbox.digest() {
                prop_assert!(header.len as usize > MAX);
            }
            prop_assert!(inbox.ready.len() <= DEPTH);
        }
    }

    #[test]
    fn the_end_of_the_stream_is_described() {
        let mut inbox = Inbox::new(MAX, DEPTH, 1).unwrap();
        let (header, payload) = message(0, 100);
        feed(&mut inbox, bytemuck::bytes_of(&header).get(..10).unwrap(), 10);
        inbox.digest().unwrap().unwrap();
        assert_eq!(inbox.cut_off().unwrap(), "within a header");
        feed(&mut inbox, &bytemuck::bytes_of(&header)[10..], 100);
        feed(&mut inbox, &payload, 40);
        inbox.digest().unwrap().unwrap();
        assert_eq!(inbox.cut_off().unwrap(), "after 40 of 100 bytes of a message");
    }
}
