//! The receiving end of a ring.

use std::sync::atomic::Ordering;

use super::memory::{Direction, Position};
use super::single_copy::Reader;
use super::{Ends, INLINE, agree, to_words, unpack};
use crate::memory::fence;
use crate::{Interest, Peer, Received, RecvLink};
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;

/// Bytes that are pulled at once when they are not pulled to where they belong.
const PULL: usize = 64 << 10;

pub(crate) struct ShmRecv {
    direction: Direction,
    ends: Ends,
    /// Messages released.
    lines: u64,
    /// Position of the oldest long message's payload in the ring.
    at: Position,
    /// Our copy of the oldest message's line, once it was read.
    head: Option<[u64; 4]>,
    inline: [u64; 3],
    /// Address of the oldest message's payload in the sender's memory; 0: it is in the line or in the ring.
    remote: u64,
    /// Offset and length of the chunk of it that is in the ring.
    chunk: (usize, usize),
    /// Bytes received of a message that comes in chunks.
    got: usize,
    /// Reader of the sender's memory; `None` if it cannot be read.
    reader: Option<Reader>,
    /// Memory for zero-copy payloads that the caller peeks at; whether the oldest message's is there.
    pulled: Vec<u64>,
    is_pulled: bool,
    armed: bool,
    lost: Option<String>,
}

impl ShmRecv {
    pub(super) fn new(direction: Direction, ends: Ends) -> ShmRecv {
        let reader = ends.single_copy.reader(&direction.head().probe);
        ShmRecv {
            direction,
            ends,
            lines: 0,
            at: Position::default(),
            head: None,
            inline: [0; 3],
            remote: 0,
            chunk: (0, 0),
            got: 0,
            reader,
            pulled: Vec::new(),
            is_pulled: false,
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
        let [first] = line.first.load();
        self.remote = if len <= INLINE { 0 } else { first };
        if len <= INLINE {
            self.inline[0] = first;
            if len > 8 {
                let [second, third] = line.rest.load();
                self.inline = [first, second, third];
            }
        } else if first == 0 {
            let [offset, bytes] = line.rest.load();
            let rest = len.saturating_sub(self.got) as u64;
            if offset != self.got as u64 || bytes == 0 || bytes > rest.min(self.direction.layout.max_message as u64) {
                return Err(self.no_chunk(&words, offset, bytes));
            }
            self.chunk = (offset as usize, bytes as usize);
        }
        self.head = Some(words);
        Ok(self.head)
    }

    /// No message yet. Is there going to be one? True if one has come in the meantime.
    #[inline]
    fn look_again(&mut self, sequence: u64) -> Result<bool> {
        let before = (self.lines + 1).saturating_sub(self.direction.layout.lines as u64);
        let gone = self.lost.is_some() || self.direction.head().sender.is_closed();
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
    fn no_chunk(&self, words: &[u64; 4], offset: u64, bytes: u64) -> Error {
        let header: Header = bytemuck::cast(*words);
        let (max, got) = (self.direction.layout.max_message, self.got);
        let detail = format!(
            "expected up to {max} bytes from byte {got} on, got {bytes} bytes from byte {offset} on, of {header}"
        );
        self.ends.peer.protocol("receive", detail)
    }

    /// Copies `len` bytes of the oldest message's zero-copy payload, from `offset` on, out of the sender's memory.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `len` bytes.
    unsafe fn pull(&mut self, offset: usize, dst: *mut u8, len: usize) -> Result<()> {
        let outcome = match &self.reader {
            // SAFETY: by the caller.
            Some(reader) => unsafe { reader.read(self.remote.wrapping_add(offset as u64), dst, len) },
            None => Err("it sent an address to a rank that cannot read its memory".to_owned()),
        };
        // Revoked in the meantime, it may be anything.
        std::sync::atomic::fence(Ordering::SeqCst);
        let revoked = self.direction.head().sender.is_closed();
        if revoked {
            return Err(self.ends.peer.lost("receive", "it closed the link before its message was pulled"));
        }
        outcome.map_err(|detail| self.ends.peer.lost("receive", &detail))
    }

    /// Copies `len` bytes of the oldest message's zero-copy payload, from `offset` on, to our own memory.
    #[cold]
    fn pull_here(&mut self, offset: usize, len: usize) -> Result<()> {
        self.pulled.resize(len.div_ceil(8).max(self.pulled.len()), 0);
        let memory = self.pulled.as_mut_ptr().cast();
        // SAFETY: there are at least `len` bytes.
        unsafe { self.pull(offset, memory, len) }
    }

    /// Returns true if [`RecvLink::peek`] can show the oldest message, of `len` bytes, whole.
    fn is_whole(&self, len: usize) -> bool {
        len <= INLINE
            || if self.remote == 0 { self.chunk == (0, len) } else { len <= self.direction.layout.max_message }
    }

    /// Frees the oldest message, of `len` bytes, or the chunk of it that is here; true when that was the last.
    #[inline(always)]
    fn free(&mut self, len: usize) -> bool {
        self.head = None;
        self.lines += 1;
        let consumed = &self.direction.head().consumed;
        if self.remote != 0 {
            self.remote = 0;
            self.is_pulled = false;
        } else if len > INLINE {
            let (offset, bytes) = self.chunk;
            self.direction.touches(self.at, bytes, false);
            self.at.advance(bytes, &self.direction.layout);
            consumed.ring.free(self.at.count);
            self.got = if offset + bytes < len { offset + bytes } else { 0 };
        }
        consumed.lines.free(self.lines);
        fence::of_waker();
        if self.direction.head().sender.glance().waiting() {
            self.wake();
        }
        self.got == 0
    }

    #[cold]
    fn wake(&mut self) {
        if self.direction.head().sender.take_waiting() {
            self.ends.bell.ring();
        }
    }
}

#[inline(always)]
fn length(words: &[u64; 4]) -> usize {
    (words[2] >> 32) as usize
}
const _: () = assert!(std::mem::offset_of!(Header, len) == 20);

impl RecvLink for ShmRecv {
    fn peer(&self) -> &Peer {
        &self.ends.peer
    }

    #[inline]
    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        let Some(words) = self.load()? else { return Ok(None) };
        let len = length(&words);
        if !self.is_whole(len) {
            return Ok(Some((bytemuck::cast(words), &[])));
        }
        let payload = if len <= INLINE {
            bytemuck::bytes_of(&self.inline).get(..len).unwrap_or_default()
        } else if self.remote != 0 {
            if !self.is_pulled {
                self.pull_here(0, len)?;
                self.is_pulled = true;
            }
            bytemuck::cast_slice(&self.pulled).get(..len).unwrap_or_default()
        } else {
            self.direction.touches(self.at, len, false);
            // SAFETY: the chunk is the whole message, checked against `max_message`; the sender leaves it alone until
            // `release` (a sender that does not may change the bytes, which are data of its own making either way).
            unsafe { std::slice::from_raw_parts(self.direction.payload(self.at), len) }
        };
        Ok(Some((bytemuck::cast(words), payload)))
    }

    #[inline]
    fn shows_in_place(&self) -> bool {
        true
    }

    fn must_pull(&mut self) -> bool {
        matches!(self.load(), Ok(Some(_))) && self.remote != 0
    }

    #[inline]
    fn release(&mut self) -> Result<()> {
        match self.head {
            Some(words) if self.is_whole(length(&words)) => {
                self.free(length(&words));
                Ok(())
            }
            _ => Err(self.ends.peer.not_peeked()),
        }
    }

    #[inline]
    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(self.ends.peer.not_receivable(expected, dst));
        }
        loop {
            let Some(words) = self.load()? else { return Ok(Received::Pending) };
            if !agree(&words, &to_words(expected)) {
                return Ok(Received::Mismatch(bytemuck::cast(words)));
            }
            if dst.len() <= INLINE {
                unpack(&self.inline, dst);
            } else if self.remote != 0 {
                // SAFETY: `dst` is as long.
                unsafe { self.pull(0, dst.as_mut_ptr(), dst.len()) }?;
            } else {
                let (offset, bytes) = self.chunk;
                // SAFETY: the message's length is `expected.len`, which is `dst.len()`; the chunk was checked to lie in
                // it, and against `max_message`.
                unsafe {
                    let to = dst.as_mut_ptr().add(offset);
                    std::ptr::copy_nonoverlapping(self.direction.payload(self.at), to, bytes);
                }
            }
            if self.free(dst.len()) {
                return Ok(Received::Done);
            }
        }
    }

    fn recv_chunks(&mut self, expected: &Header, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        loop {
            let Some(words) = self.load()? else { return Ok(Received::Pending) };
            if !agree(&words, &to_words(expected)) {
                return Ok(Received::Mismatch(bytemuck::cast(words)));
            }
            let len = length(&words);
            if len <= INLINE {
                sink(0, bytemuck::bytes_of(&self.inline).get(..len).unwrap_or_default());
            } else if self.remote != 0 {
                for offset in (0..len).step_by(PULL) {
                    let bytes = PULL.min(len - offset);
                    self.pull_here(offset, bytes)?;
                    sink(offset, bytemuck::cast_slice(&self.pulled).get(..bytes).unwrap_or_default());
                }
            } else {
                let (offset, bytes) = self.chunk;
                self.direction.touches(self.at, bytes, false);
                // SAFETY: as in `peek`.
                sink(offset, unsafe { std::slice::from_raw_parts(self.direction.payload(self.at), bytes) });
            }
            if self.free(len) {
                return Ok(Received::Done);
            }
        }
    }

    fn progress(&mut self) -> Result<bool> {
        Ok(false)
    }

    fn bytes_moved(&self) -> u64 {
        self.at.count
    }

    fn check_peer(&mut self) -> Result<()> {
        if self.lost.is_none() {
            self.lost = self.ends.broken();
        }
        self.load().map(drop)
    }

    fn arm(&mut self) -> Result<bool> {
        self.armed = true;
        self.direction.head().receiver.ask_to_be_woken();
        fence::of_sleeper();
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
            self.direction.head().receiver.awake();
        }
    }

    fn interest(&self) -> Interest {
        self.ends.interest()
    }
}

impl Drop for ShmRecv {
    fn drop(&mut self) {
        if self.ends.are_ours() {
            self.direction.head().receiver.close();
            self.ends.bell.ring();
        }
    }
}
