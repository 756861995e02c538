//! The receiving end of a ring.

use std::fmt;

use super::memory::{Direction, Place};
use super::{Ends, INLINE, agree, to_words, unpack};
use crate::error::{Error, Result};
use crate::transport::{Interest, Peer, Received, RecvLink};
use crate::wire::Header;

pub(crate) struct RingRecv {
    direction: Direction,
    ends: Ends,
    /// Messages released.
    lines: u64,
    /// Of the oldest long message's payload.
    place: Place,
    /// Our copy of the oldest message's line, once it was read.
    head: Option<[u64; 4]>,
    inline: [u64; 3],
    armed: bool,
    lost: Option<String>,
}

impl RingRecv {
    pub(super) fn new(direction: Direction, ends: Ends) -> RingRecv {
        RingRecv {
            direction,
            ends,
            lines: 0,
            place: Place::default(),
            head: None,
            inline: [0; 3],
            armed: false,
            lost: None,
        }
    }

    /// Reads the oldest message's line into `head` and `inline`, and checks its length.
    #[inline(always)]
    fn load(&mut self) -> Result<Option<[u64; 4]>> {
        if self.head.is_some() {
            return Ok(self.head);
        }
        let line = self.direction.line(self.lines);
        let sequence = line.sequence.published();
        if sequence != self.lines + 1 && !self.look_again(sequence)? {
            return Ok(None);
        }
        let line = self.direction.line(self.lines);
        let words = line.header.load();
        let len = length(&words);
        if len <= INLINE {
            let [first] = line.first.load();
            self.inline[0] = first;
            if len > 8 {
                let [second, third] = line.rest.load();
                self.inline = [first, second, third];
            }
        } else if len > self.direction.layout.max_message {
            return Err(self.too_long(&words));
        }
        self.head = Some(words);
        Ok(self.head)
    }

    /// No message yet. Is there going to be one? True if one has come in the meantime.
    #[inline]
    fn look_again(&mut self, sequence: u64) -> Result<bool> {
        let before = (self.lines + 1).saturating_sub(self.direction.layout.lines as u64);
        let gone = self.lost.is_some() || self.direction.sender().is_closed();
        if sequence == before && !gone { Ok(false) } else { self.trouble(before) }
    }

    #[cold]
    fn trouble(&mut self, before: u64) -> Result<bool> {
        let expected = self.lines + 1;
        let now = self.direction.line(self.lines).sequence.published();
        if now == expected {
            return Ok(true);
        }
        if now != before {
            let detail = format!("expected sequence number {before} or {expected} in shared memory, got {now}");
            return Err(self.ends.peer.protocol("receive", detail));
        }
        Err(self.ends.peer.lost("receive", self.lost.as_deref().unwrap_or("it closed the link")))
    }

    #[cold]
    fn too_long(&self, words: &[u64; 4]) -> Error {
        let header: Header = bytemuck::cast(*words);
        let max = self.direction.layout.max_message;
        self.ends.peer.protocol("receive", format!("expected a message of up to {max} bytes, got {header}"))
    }

    #[cold]
    fn misuse(&self, detail: String) -> Error {
        Error::invalid("receive", format!("from rank {}: {detail}", self.ends.peer.peer))
    }

    /// Frees the oldest message, of `len` bytes.
    #[inline(always)]
    fn free(&mut self, len: usize) {
        self.head = None;
        self.lines += 1;
        let consumed = self.direction.consumed();
        if len > INLINE {
            self.direction.touches(self.place, len, false);
            self.place.advance(len, &self.direction.layout);
            consumed.room.free(self.place.count);
        }
        consumed.lines.free(self.lines);
        self.ends.fence.light();
        if self.direction.sender().glance().waiting() {
            self.wake();
        }
    }

    #[cold]
    fn wake(&mut self) {
        if self.direction.sender().take_waiting() {
            self.ends.bell.ring();
        }
    }
}

#[inline(always)]
fn length(words: &[u64; 4]) -> usize {
    (words[2] >> 32) as usize
}
const _: () = assert!(std::mem::offset_of!(Header, len) == 20);

impl RecvLink for RingRecv {
    fn peer(&self) -> &Peer {
        &self.ends.peer
    }

    #[inline]
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        let Some(words) = self.load()? else { return Ok(None) };
        let len = length(&words);
        let payload = if len <= INLINE {
            bytemuck::bytes_of(&self.inline).get(..len).unwrap_or_default()
        } else {
            self.direction.touches(self.place, len, false);
            // SAFETY: `len` was checked against `max_message`, which there is room for; the sender leaves it alone until
            // `release` (a sender that does not may change the bytes, which are data of its own making either way).
            unsafe { std::slice::from_raw_parts(self.direction.payload(self.place), len) }
        };
        Ok(Some((bytemuck::cast(words), payload)))
    }

    #[inline]
    fn shows_in_place(&self) -> bool {
        true
    }

    #[inline]
    fn release(&mut self) -> Result<()> {
        match self.head {
            Some(words) => {
                self.free(length(&words));
                Ok(())
            }
            None => Err(self.misuse("expected a peeked message to release, got none".to_owned())),
        }
    }

    #[inline]
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            let got = dst.len();
            return Err(self.misuse(format!("expected memory for {expected}, got {got} bytes")));
        }
        let Some(words) = self.load()? else { return Ok(Received::Pending) };
        if !agree(&words, &to_words(expected)) {
            return Ok(Received::Mismatch(bytemuck::cast(words)));
        }
        if dst.len() <= INLINE {
            unpack(&self.inline, dst);
        } else {
            // SAFETY: the message's length is `expected.len`, which is `dst.len()`, and was checked against `max_message`.
            unsafe { std::ptr::copy_nonoverlapping(self.direction.payload(self.place), dst.as_mut_ptr(), dst.len()) };
        }
        self.free(dst.len());
        Ok(Received::Done)
    }

    fn progress(&mut self) -> Result<bool> {
        Ok(false)
    }

    fn check_peer(&mut self) -> Result<()> {
        if self.lost.is_none() {
            self.lost = self.ends.lifeline.as_ref().and_then(|l| l.broken());
        }
        self.load().map(drop)
    }

    fn arm(&mut self) -> Result<bool> {
        self.armed = true;
        self.direction.receiver().ask_to_be_woken();
        self.ends.fence.heavy();
        if self.load()?.is_some() {
            return Ok(true);
        }
        // One more system call: who sleeps next finds out here that the other process was killed.
        self.check_peer()?;
        Ok(self.head.is_some())
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.direction.receiver().awake();
        }
    }

    fn interest(&self) -> Interest {
        self.ends.lifeline.as_ref().map(|l| l.interest()).unwrap_or_default()
    }
}

impl Drop for RingRecv {
    fn drop(&mut self) {
        self.direction.receiver().close();
        self.ends.bell.ring();
    }
}

impl fmt::Debug for RingRecv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingRecv").field("peer", &self.ends.peer).field("received", &self.lines).finish_non_exhaustive()
    }
}
