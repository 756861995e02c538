//! The sending end of a ring.

use std::fmt;

use super::memory::{Direction, Place, taken};
use super::words::Look;
use super::{Ends, INLINE, pack, to_words};
use crate::error::{Error, Result};
use crate::transport::{Interest, Peer, SendLink};
use crate::wire::Header;

pub(crate) struct RingSend {
    direction: Direction,
    ends: Ends,
    /// Messages sent, and the count at which credit must be looked up again.
    lines: u64,
    lines_limit: u64,
    /// The same for bytes of the payload room.
    place: Place,
    room_limit: u64,
    reserved: bool,
    armed: bool,
    /// Bytes of room that the last refusal was for want of; 0: it was for want of a line.
    wants: usize,
    lost: Option<String>,
}

impl RingSend {
    pub(super) fn new(direction: Direction, ends: Ends) -> RingSend {
        let (lines_limit, room_limit) = (direction.layout.lines as u64, direction.layout.room as u64);
        RingSend {
            direction,
            ends,
            lines: 0,
            lines_limit,
            place: Place::default(),
            room_limit,
            reserved: false,
            armed: false,
            wants: 0,
            lost: None,
        }
    }

    /// A line and `bytes` of the room are free.
    #[inline(always)]
    fn has_credit(&self, bytes: usize) -> bool {
        self.lines < self.lines_limit && self.place.count + taken(bytes) as u64 <= self.room_limit
    }

    #[inline(always)]
    fn credit(&mut self, bytes: usize) -> Result<bool> {
        if self.has_credit(bytes) { Ok(true) } else { self.refresh(bytes) }
    }

    #[cold]
    fn refresh(&mut self, bytes: usize) -> Result<bool> {
        self.alive()?;
        let consumed = self.direction.consumed();
        let (lines, room) = (consumed.lines.freed(), consumed.room.freed());
        let layout = &self.direction.layout;
        for (name, sent, freed, size) in
            [("lines", self.lines, lines, layout.lines), ("bytes", self.place.count, room, layout.room)]
        {
            if freed > sent || sent - freed > size as u64 {
                let detail = format!("expected {size} {name} at most in use of {sent} sent, got {freed} freed");
                return Err(self.ends.peer.protocol("send", detail));
            }
        }
        self.lines_limit = lines + layout.lines as u64;
        self.room_limit = room + layout.room as u64;
        let ready = self.has_credit(bytes);
        if !ready {
            self.wants = if self.lines < self.lines_limit { bytes } else { 0 };
        }
        Ok(ready)
    }

    fn alive(&mut self) -> Result<()> {
        if self.lost.is_none() && self.direction.receiver().is_closed() {
            self.lose("it closed the link".to_owned());
        }
        match &self.lost {
            Some(detail) => Err(self.ends.peer.lost("send", detail)),
            None => Ok(()),
        }
    }

    /// From now on there is no credit, so that the fast path ends in `refresh`, which tells why.
    fn lose(&mut self, detail: String) {
        self.lost = Some(detail);
        (self.lines_limit, self.room_limit) = (0, 0);
    }

    #[inline(always)]
    fn publish(&mut self, header: &Header, inline: Option<[u64; 3]>) -> Result<()> {
        let line = self.direction.line(self.lines);
        line.header.store(to_words(header));
        match inline {
            Some([first, second, third]) => {
                line.first.store([first]);
                if header.len > 8 {
                    line.rest.store([second, third]);
                }
            }
            None => {
                self.direction.touches(self.place, header.len as usize, true);
                self.place.advance(header.len as usize, &self.direction.layout);
            }
        }
        self.lines += 1;
        line.sequence.publish(self.lines);
        self.ends.fence.light();
        let state = self.direction.receiver().glance();
        if state.is_plain() { Ok(()) } else { self.attend(state) }
    }

    /// The receiver sleeps or is gone.
    #[cold]
    fn attend(&mut self, state: Look) -> Result<()> {
        if state.closed() {
            return self.alive();
        }
        if self.direction.receiver().take_waiting() {
            self.ends.bell.ring();
        }
        Ok(())
    }

    #[cold]
    fn misuse(&self, detail: String) -> Error {
        Error::invalid("send", format!("to rank {}: {detail}", self.ends.peer.peer))
    }
}

impl SendLink for RingSend {
    fn peer(&self) -> &Peer {
        &self.ends.peer
    }

    #[inline]
    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        if !self.reserved {
            if self.direction.receiver().glance().closed() {
                self.alive()?;
            }
            if !self.credit(self.direction.layout.max_message)? {
                return Ok(None);
            }
            self.reserved = true;
        }
        let max = self.direction.layout.max_message;
        self.direction.touches(self.place, max, true);
        // SAFETY: there are `max_message` bytes, and they are ours alone until `commit`: the receiver has freed them (credit).
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(self.direction.payload(self.place), max) }))
    }

    #[inline]
    fn commit(&mut self, header: &Header) -> Result<()> {
        let len = header.len as usize;
        if !self.reserved || len > self.direction.layout.max_message {
            let max = self.direction.layout.max_message;
            return Err(self.misuse(format!("expected a reserved message of up to {max} bytes, got {header}")));
        }
        self.reserved = false;
        if len > INLINE {
            return self.publish(header, None);
        }
        // SAFETY: as in `reserve`; `len` is at most `max_message`.
        let data = unsafe { std::slice::from_raw_parts(self.direction.payload(self.place), len) };
        self.publish(header, Some(pack(data)))
    }

    #[inline]
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        let max = self.direction.layout.max_message;
        if data.len() != header.len as usize || data.len() > max || self.reserved {
            let got = data.len();
            return Err(
                self.misuse(format!("expected {header} of up to {max} bytes and none reserved, got {got} bytes"))
            );
        }
        if data.len() <= INLINE {
            if !self.credit(0)? {
                return Ok(false);
            }
            self.publish(header, Some(pack(data)))?;
            return Ok(true);
        }
        if !self.credit(data.len())? {
            return Ok(false);
        }
        // SAFETY: there are `max_message >= data.len()` bytes, so many of them ours alone (credit).
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.direction.payload(self.place), data.len()) };
        self.publish(header, None)?;
        Ok(true)
    }

    fn progress(&mut self) -> Result<bool> {
        Ok(false)
    }

    #[inline]
    fn sends_from_caller(&self, bytes: usize) -> bool {
        bytes <= INLINE
    }

    fn is_flushed(&self) -> bool {
        true
    }

    fn check_peer(&mut self) -> Result<()> {
        if self.lost.is_none()
            && let Some(detail) = self.ends.lifeline.as_ref().and_then(|l| l.broken())
        {
            self.lose(detail);
        }
        self.alive()
    }

    fn arm(&mut self) -> Result<bool> {
        self.armed = true;
        self.direction.sender().ask_to_be_woken();
        self.ends.fence.heavy();
        // One more system call: who sleeps next finds out here that the other process was killed.
        let ready = self.refresh(self.wants)?;
        if !ready {
            self.check_peer()?;
        }
        Ok(ready)
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.direction.sender().awake();
        }
    }

    fn interest(&self) -> Interest {
        self.ends.lifeline.as_ref().map(|l| l.interest()).unwrap_or_default()
    }
}

impl Drop for RingSend {
    fn drop(&mut self) {
        self.direction.sender().close();
        self.ends.bell.ring();
    }
}

impl fmt::Debug for RingSend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingSend").field("peer", &self.ends.peer).field("sent", &self.lines).finish_non_exhaustive()
    }
}
