//! The sending side of a link: what may be posted now, and posting it.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::{Core, Goodbye, SIGNAL};
use crate::error::Result;
use crate::transport::verbs::layout::{Kind, Ring, word};
use crate::transport::verbs::sys::{Stretch, Write};
use crate::wire::Header;

/// Longest wait for requests of a queue pair that was stopped.
const FLUSH: Duration = Duration::from_secs(1);

impl Core {
    /// Tells the peer what is freed, in a write of its own.
    pub(super) fn report(&mut self) {
        if self.lost.is_some() {
            return;
        }
        self.report_due = self.is_full();
        if self.report_due {
            self.poll_for_room();
        }
        if !self.report_due {
            let local = self.parts.staging.base();
            // SAFETY: nothing is read for a write of 0 bytes.
            unsafe { self.post(Kind::Report, local, 0, 0, false, false, None) };
        }
    }

    /// Completions may be waiting. Not `poll`, which may be what called us.
    fn poll_for_room(&mut self) {
        if let Ok(batch) = self.parts.cq.poll() {
            batch.iter().for_each(|completion| self.take(completion));
            self.report_due = self.is_full();
        }
    }

    /// No further request may be posted now.
    fn is_full(&self) -> bool {
        self.posted - self.completed >= self.parts.limit
    }

    /// A message can go to this ring.
    #[inline]
    fn has_room(&self, ring: Ring) -> bool {
        let sent = *self.sent.of(ring);
        let staged = ring == Ring::Slots || !self.goes_inline();
        sent - *self.freed_there.of(ring) < self.parts.layout.size(ring) as u64
            && !self.is_full()
            && (!staged || self.completed >= self.last_use(ring))
    }

    fn last_use(&self, ring: Ring) -> u64 {
        let place = self.parts.layout.place(ring, *self.sent.of(ring));
        self.used.of(ring).get(place).copied().unwrap_or(0)
    }

    /// Lines are written inline.
    #[inline]
    fn goes_inline(&self) -> bool {
        self.parts.qp.inline() as usize >= self.parts.layout.longest(Ring::Lines) + Header::BYTES
    }

    /// A message can go to this ring; asks the device when none could so far.
    #[inline]
    pub(in super::super) fn room(&mut self, ring: Ring) -> Result<bool> {
        self.sending()?;
        if self.has_room(ring) {
            return Ok(true);
        }
        self.poll();
        self.sending()?;
        Ok(self.has_room(ring))
    }

    /// The staging place of the next message in this ring: the address of its header. There must be room.
    #[inline]
    pub(in super::super) fn staging(&self, ring: Ring) -> NonNull<u8> {
        let layout = &self.parts.layout;
        // SAFETY: a place of the ring lies within the staging memory.
        unsafe { self.parts.staging.at(layout.offset(ring, layout.place(ring, *self.sent.of(ring)))) }
    }

    /// Sends a message of at most [`Layout::longest`] bytes through the lines. There must be room.
    #[inline]
    pub(in super::super) fn send_line(&mut self, header: &Header, data: &[u8]) -> Result<()> {
        let len = Header::BYTES + data.len();
        if self.goes_inline() {
            let mut line = [0u8; 512];
            let (head, body) = line.split_at_mut(Header::BYTES);
            head.copy_from_slice(bytemuck::bytes_of(header));
            if let Some(body) = body.get_mut(..data.len()) {
                body.copy_from_slice(data);
            }
            // SAFETY: the line outlives the call, and inline data is copied by it.
            unsafe { self.send(Ring::Lines, NonNull::from(&mut line).cast(), len, true, None) };
        } else {
            let at = self.staging(Ring::Lines);
            // SAFETY: the line has room for the header and `longest` bytes, and the request that last read it has completed.
            unsafe {
                at.cast::<Header>().write_unaligned(*header);
                at.add(Header::BYTES).as_ptr().copy_from_nonoverlapping(data.as_ptr(), data.len());
                self.send(Ring::Lines, at, len, false, None);
            }
        }
        self.sending()
    }

    /// Sends the message of `header.len` bytes that is in the staging slot. There must have been room.
    #[inline]
    pub(in super::super) fn send_slot(&mut self, header: &Header) -> Result<()> {
        let at = self.staging(Ring::Slots);
        // SAFETY: a header fits before the payload; the request that last read the slot has completed (`room`).
        unsafe {
            at.cast::<Header>().write_unaligned(*header);
            self.send(Ring::Slots, at, Header::BYTES + header.len as usize, false, None);
        }
        self.sending()
    }

    /// The key of a caller's memory if it is registered.
    #[inline]
    pub(in super::super) fn lkey(&self, data: &[u8]) -> Option<u32> {
        self.parts.device.registered.lkey(data)
    }

    /// Sends a message of `header.len` bytes from the caller's memory, registered under `lkey`. There must have been room in
    /// the slots, and `data` must not be empty.
    ///
    /// # Safety
    /// Nobody may write to `data` until [`Core::has_sent`] or [`Core::let_go`] says so.
    #[inline]
    pub(in super::super) unsafe fn send_lent(&mut self, header: &Header, data: &[u8], lkey: u32) -> Result<()> {
        let at = self.staging(Ring::Slots);
        let data = Stretch { at: NonNull::from(data).cast(), len: header.len, lkey };
        // SAFETY: as in `send_slot`; the data by the caller.
        unsafe {
            at.cast::<Header>().write_unaligned(*header);
            self.send(Ring::Slots, at, Header::BYTES, false, Some(data));
        }
        self.lent_until = self.posted;
        self.lent_messages += 1;
        self.sending()
    }

    /// No request reads a caller's memory any more, as far as is known.
    #[inline]
    pub(in super::super) fn has_sent(&self) -> bool {
        self.completed >= self.lent_until
    }

    /// Ends what still reads a caller's memory, and with it the link.
    pub(in super::super) fn let_go(&mut self) {
        self.poll();
        if self.has_sent() {
            return;
        }
        self.lose("a call over it failed while it was sending".to_owned());
        if let Err(e) = self.parts.qp.stop() {
            log::error!("rank {}: RDMA link with rank {}: {e}", self.peer.rank, self.peer.peer);
        }
        // The device gives back what was posted at once.
        let end = Instant::now() + FLUSH;
        while !self.has_sent() {
            self.poll();
            if Instant::now() >= end {
                log::error!(
                    "rank {}: RDMA link with rank {}: the device has not given back {} requests; it may still read memory that \
                     was sent from",
                    self.peer.rank,
                    self.peer.peer,
                    self.in_flight()
                );
                return;
            }
            std::thread::yield_now();
        }
    }

    /// # Safety
    /// As [`Core::post`].
    #[inline]
    unsafe fn send(&mut self, ring: Ring, from: NonNull<u8>, len: usize, inline: bool, then: Option<Stretch>) {
        let layout = &self.parts.layout;
        let place = layout.place(ring, *self.sent.of(ring));
        let offset = layout.offset(ring, place);
        *self.sent.of_mut(ring) += 1;
        // SAFETY: by the caller.
        let id = unsafe { self.post(Kind::Message(ring), from, len, offset, inline, !inline, then) };
        if !inline && let Some(used) = self.used.of_mut(ring).get_mut(place) {
            *used = id;
        }
    }

    /// Posts a write; its number.
    ///
    /// # Safety
    /// `from` must be valid for `len` bytes of the staging memory, which nobody changes until the request has completed;
    /// or, inline, of any memory. What is sent `then` must be registered, and nobody may change it either.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "the parts of one request")]
    unsafe fn post(
        &mut self,
        kind: Kind,
        from: NonNull<u8>,
        len: usize,
        offset: usize,
        inline: bool,
        signaled: bool,
        then: Option<Stretch>,
    ) -> u64 {
        self.posted += 1;
        self.unsignaled += 1;
        let signaled = signaled || self.unsignaled >= SIGNAL;
        if signaled {
            self.unsignaled = 0;
        }
        let write = Write {
            id: self.posted,
            local: from,
            lkey: self.parts.staging.lkey(),
            len: len as u32,
            remote: self.remote.address + offset as u64,
            rkey: self.remote.rkey,
            word: word(kind, &self.freed),
            signaled,
            inline,
            then,
        };
        self.reported = self.freed;
        self.report_due = false;
        // SAFETY: by the caller.
        if let Err(e) = unsafe { self.parts.qp.post_write(&write) } {
            self.lose(e.to_string());
        }
        self.posted
    }

    /// Nothing will be sent any more.
    pub(in super::super) fn say_goodbye(&mut self) {
        if self.goodbye == Goodbye::Unsaid {
            self.goodbye = Goodbye::Due;
        }
        if self.goodbye == Goodbye::Due && self.lost.is_none() && !self.is_full() {
            let local = self.parts.staging.base();
            // SAFETY: nothing is read for a write of 0 bytes.
            let id = unsafe { self.post(Kind::Goodbye, local, 0, 0, false, true, None) };
            self.goodbye = Goodbye::Posted(id);
        }
    }
}
