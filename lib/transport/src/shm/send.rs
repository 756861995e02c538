//! The sending end of a ring.

use std::sync::atomic::Ordering;

use super::memory::{Direction, Position, taken};
use super::single_copy::Worth;
use super::words::EndFlags;
use super::{Ends, INLINE, pack, to_words};
use crate::memory::fence;
use crate::{Interest, Peer, SendLink, ZeroCopy};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// Longest message, in bytes, that is neither cut nor sent by zero copy.
const CHUNK: usize = if cfg!(loom) { 64 } else { 32 << 10 };

/// Location of a message's payload.
enum Payload {
    Inline([u64; 3]),
    /// In the ring: a chunk of the message, by its offset in the message and its length in bytes.
    Ring(usize, usize),
    /// At this address in our memory.
    ZeroCopy(u64),
}

pub(crate) struct ShmSend {
    direction: Direction,
    ends: Ends,
    /// Messages sent, and the count at which credit must be looked up again.
    lines: u64,
    lines_limit: u64,
    /// Position in the payload ring, and its count of bytes at which credit must be looked up again.
    at: Position,
    ring_limit: u64,
    reserved: bool,
    armed: bool,
    /// Bytes of the ring that the last refusal was for want of; 0: it was for want of a line.
    wants: usize,
    /// The last message was refused.
    refused: bool,
    /// Count of lines with the last zero-copy one that the receiver may not have pulled; 0: there is none.
    last_zero_copy: u64,
    /// Messages sent by zero copy so far.
    zero_copies: u64,
    /// Bytes sent so far of the message that `send_chunks` is sending chunk by chunk.
    sent: usize,
    /// Last answer whether a long message is worth zero copy.
    worth: Worth,
    lost: Option<String>,
}

impl ShmSend {
    pub(super) fn new(direction: Direction, ends: Ends) -> ShmSend {
        let (lines_limit, ring_limit) = (direction.layout.lines as u64, direction.layout.ring as u64);
        ShmSend {
            direction,
            ends,
            lines: 0,
            lines_limit,
            at: Position::default(),
            ring_limit,
            reserved: false,
            armed: false,
            wants: 0,
            refused: false,
            last_zero_copy: 0,
            zero_copies: 0,
            sent: 0,
            worth: Worth::default(),
            lost: None,
        }
    }

    /// A line and `bytes` of the ring are free.
    #[inline(always)]
    fn has_credit(&self, bytes: usize) -> bool {
        self.lines < self.lines_limit && self.at.count + taken(bytes) as u64 <= self.ring_limit
    }

    #[inline(always)]
    fn credit(&mut self, bytes: usize) -> Result<bool> {
        if self.has_credit(bytes) { Ok(true) } else { self.refresh(bytes) }
    }

    #[cold]
    fn refresh(&mut self, bytes: usize) -> Result<bool> {
        self.alive()?;
        let consumed = &self.direction.head().consumed;
        let (lines, ring) = (consumed.lines.freed(), consumed.ring.freed());
        let layout = &self.direction.layout;
        for (name, sent, freed, size) in
            [("lines", self.lines, lines, layout.lines), ("bytes", self.at.count, ring, layout.ring)]
        {
            if freed > sent || sent - freed > size as u64 {
                let detail = format!("expected {size} {name} at most in use of {sent} sent, got {freed} freed");
                return Err(self.ends.peer.protocol("send", detail));
            }
        }
        self.lines_limit = lines + layout.lines as u64;
        self.ring_limit = ring + layout.ring as u64;
        let ready = self.has_credit(bytes);
        self.refused = !ready;
        if !ready {
            self.wants = if self.lines < self.lines_limit { bytes } else { 0 };
        }
        Ok(ready)
    }

    fn alive(&mut self) -> Result<()> {
        if self.lost.is_none() && self.direction.head().receiver.is_closed() {
            self.lose("it closed the link".to_owned());
        }
        match &self.lost {
            Some(detail) => Err(self.ends.peer.lost("send", detail)),
            None => Ok(()),
        }
    }

    /// From now on there is no credit, so that the fast path ends in `refresh`, which gives the reason.
    fn lose(&mut self, detail: String) {
        self.lost = Some(detail);
        (self.lines_limit, self.ring_limit) = (0, 0);
    }

    /// True once the receiver has pulled everything.
    fn settle(&mut self) -> Result<bool> {
        // Who is closed has freed all that it ever will.
        let closed = self.direction.head().receiver.is_closed();
        let freed = self.direction.head().consumed.lines.freed();
        if freed > self.lines {
            let detail = format!("expected {} lines at most to be freed, got {freed}", self.lines);
            return Err(self.ends.peer.protocol("send", detail));
        }
        if freed >= self.last_zero_copy {
            self.last_zero_copy = 0;
        } else if closed || self.lost.is_some() {
            self.alive()?;
        }
        Ok(self.last_zero_copy == 0)
    }

    /// Zero-copy messages were under way and are pulled, whatever became of the peer since.
    fn is_settled(&mut self) -> Result<bool> {
        Ok(self.last_zero_copy != 0 && self.settle()?)
    }

    #[inline(always)]
    fn publish(&mut self, header: &Header, payload: Payload) -> Result<()> {
        let line = self.direction.line(self.lines);
        line.header.store(to_words(header));
        match payload {
            Payload::Inline([first, second, third]) => {
                line.first.store([first]);
                if header.len > 8 {
                    line.rest.store([second, third]);
                }
            }
            Payload::ZeroCopy(address) => {
                line.first.store([address]);
                self.last_zero_copy = self.lines + 1;
                self.zero_copies += 1;
            }
            Payload::Ring(offset, bytes) => {
                line.first.store([0]);
                line.rest.store([offset as u64, bytes as u64]);
                self.direction.touches(self.at, bytes, true);
                self.at.advance(bytes, &self.direction.layout);
            }
        }
        self.refused = false;
        self.lines += 1;
        line.sequence.publish(self.lines);
        fence::of_waker();
        let state = self.direction.head().receiver.glance();
        if state.is_plain() { Ok(()) } else { self.attend(state) }
    }

    /// Sends a long message through the ring, in chunks: the receiver copies one out while we copy the next one in.
    fn send_chunks(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        let max = self.direction.layout.max_message;
        let longest = (data.len() / 4).max(CHUNK).next_multiple_of(64).min(max);
        while let Some(chunk) = data.get(self.sent..(self.sent + longest).min(data.len())).filter(|p| !p.is_empty()) {
            if !self.credit(chunk.len())? {
                return Ok(false);
            }
            // SAFETY: a chunk is at most `max_message` bytes, so many of them ours alone (credit).
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), self.direction.payload(self.at), chunk.len()) };
            self.publish(header, Payload::Ring(self.sent, chunk.len()))?;
            self.sent += chunk.len();
        }
        self.sent = 0;
        Ok(true)
    }

    /// The receiver has closed the link, and had taken all that was sent before: no message is lost.
    fn has_taken_all(&self) -> bool {
        let head = self.direction.head();
        // In this order: what it freed before it closed can be seen.
        head.receiver.is_closed() && head.consumed.lines.freed() == self.lines
    }

    /// The receiver sleeps or is gone. It may have taken the message just published, and have left with it.
    #[cold]
    fn attend(&mut self, state: EndFlags) -> Result<()> {
        if state.closed() {
            return if self.has_taken_all() { Ok(()) } else { self.alive() };
        }
        if self.direction.head().receiver.take_waiting() {
            self.ends.bell.ring();
        }
        Ok(())
    }
}

impl SendLink for ShmSend {
    fn peer(&self) -> &Peer {
        &self.ends.peer
    }

    #[inline]
    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        if !self.reserved {
            if self.direction.head().receiver.glance().closed() {
                self.alive()?;
            }
            if !self.credit(self.direction.layout.max_message)? {
                return Ok(None);
            }
            self.reserved = true;
        }
        let max = self.direction.layout.max_message;
        self.direction.touches(self.at, max, true);
        // SAFETY: there are `max_message` bytes, and they are ours alone until `commit`: the receiver has freed them
        // (credit).
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(self.direction.payload(self.at), max) }))
    }

    #[inline]
    fn commit(&mut self, header: &Header) -> Result<()> {
        let len = header.len as usize;
        if !self.reserved || len > self.direction.layout.max_message {
            return Err(self.ends.peer.not_reserved(header, self.direction.layout.max_message));
        }
        self.reserved = false;
        if len > INLINE {
            return self.publish(header, Payload::Ring(0, len));
        }
        // SAFETY: as in `reserve`; `len` is at most `max_message`.
        let data = unsafe { std::slice::from_raw_parts(self.direction.payload(self.at), len) };
        self.publish(header, Payload::Inline(pack(data)))
    }

    #[inline]
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        let max = self.direction.layout.max_message;
        if data.len() > max && self.ends.single_copy.is_on() && data.len() == header.len as usize && !self.reserved {
            return self.send_chunks(header, data);
        }
        if data.len() != header.len as usize || data.len() > max || self.reserved {
            return Err(self.ends.peer.not_sendable(header, data, max));
        }
        if data.len() <= INLINE {
            if !self.credit(0)? {
                return Ok(false);
            }
            self.publish(header, Payload::Inline(pack(data)))?;
            return Ok(true);
        }
        if !self.credit(data.len())? {
            return Ok(false);
        }
        // SAFETY: there are `max_message >= data.len()` bytes, so many of them ours alone (credit).
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.direction.payload(self.at), data.len()) };
        self.publish(header, Payload::Ring(0, data.len()))?;
        Ok(true)
    }

    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        if self.ends.single_copy.is_on() { Some(self) } else { None }
    }

    fn progress(&mut self) -> Result<bool> {
        if self.last_zero_copy == 0 { Ok(false) } else { self.settle() }
    }

    #[inline]
    fn sends_from_caller(&self, bytes: usize) -> bool {
        bytes <= INLINE
    }

    fn is_flushed(&self) -> bool {
        self.last_zero_copy == 0
    }

    fn bytes_moved(&self) -> u64 {
        self.at.count
    }

    fn check_peer(&mut self) -> Result<()> {
        if self.is_settled()? {
            return Ok(());
        }
        if self.lost.is_none()
            && let Some(detail) = self.ends.broken()
        {
            self.lose(detail);
        }
        self.alive()
    }

    fn arm(&mut self) -> Result<bool> {
        self.armed = true;
        self.direction.head().sender.ask_to_be_woken();
        fence::of_sleeper();
        // One more system call: who sleeps next finds out here that the other process was killed.
        // A sender that was not refused waits until its zero-copy messages are pulled.
        let ready = if self.last_zero_copy == 0 || self.refused { self.refresh(self.wants)? } else { self.settle()? };
        if !ready {
            self.check_peer()?;
        }
        Ok(ready)
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.direction.head().sender.awake();
        }
    }

    fn interest(&self) -> Interest {
        self.ends.interest()
    }
}

impl ZeroCopy for ShmSend {
    unsafe fn send(&mut self, header: &Header, data: &[u8], two_way: bool) -> Result<bool> {
        let worth = data.len() > CHUNK;
        let short = !worth && data.len() <= self.direction.layout.max_message;
        if short || data.len() != header.len as usize || self.reserved {
            return self.send_from(header, data);
        }
        if !self.credit(0)? {
            return Ok(false);
        }
        let may = worth && self.sent == 0 && self.direction.head().probe.can_pull();
        if may && self.ends.single_copy.takes(data, two_way, &mut self.worth) {
            self.publish(header, Payload::ZeroCopy(data.as_ptr() as u64))?;
            return Ok(true);
        }
        self.send_chunks(header, data)
    }

    fn receiver_pulls(&self) -> bool {
        true
    }

    fn messages(&self) -> u64 {
        self.zero_copies
    }

    fn revoke(&mut self) {
        if self.last_zero_copy != 0 && !matches!(self.settle(), Ok(true)) {
            self.lose("zero-copy memory was revoked after an error".to_owned());
            self.direction.head().sender.close();
            // A receiver that reads what is written from now on must see that we have closed.
            std::sync::atomic::fence(Ordering::SeqCst);
        }
    }
}

impl Drop for ShmSend {
    fn drop(&mut self) {
        if self.ends.are_ours() {
            self.direction.head().sender.close();
            self.ends.bell.ring();
        }
    }
}
