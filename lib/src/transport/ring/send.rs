//! The sending end of a ring.

use std::fmt;

use super::memory::Direction;
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
    /// The same for long messages.
    areas: u64,
    areas_limit: u64,
    reserved: bool,
    armed: bool,
    /// The last refusal was for want of a payload area, not of a line.
    wants_area: bool,
    lost: Option<String>,
}

impl RingSend {
    pub(super) fn new(direction: Direction, ends: Ends) -> RingSend {
        let (lines_limit, areas_limit) = (direction.layout.lines as u64, direction.layout.depth as u64);
        RingSend {
            direction,
            ends,
            lines: 0,
            lines_limit,
            areas: 0,
            areas_limit,
            reserved: false,
            armed: false,
            wants_area: false,
            lost: None,
        }
    }

    /// A line, and a payload area for a long message, are free.
    #[inline(always)]
    fn credit(&mut self, area: bool) -> Result<bool> {
        if self.lines < self.lines_limit && (!area || self.areas < self.areas_limit) {
            return Ok(true);
        }
        self.refresh(area)
    }

    #[cold]
    fn refresh(&mut self, area: bool) -> Result<bool> {
        self.alive()?;
        let consumed = self.direction.consumed();
        let (lines, areas) = (consumed.lines.freed(), consumed.areas.freed());
        let layout = &self.direction.layout;
        for (name, sent, freed, size) in
            [("lines", self.lines, lines, layout.lines), ("areas", self.areas, areas, layout.depth)]
        {
            if freed > sent || sent - freed > size as u64 {
                let detail = format!("expected {size} {name} at most in use of {sent} sent, got {freed} freed");
                return Err(self.ends.peer.protocol("send", detail));
            }
        }
        self.lines_limit = lines + layout.lines as u64;
        self.areas_limit = areas + layout.depth as u64;
        let ready = self.lines < self.lines_limit && (!area || self.areas < self.areas_limit);
        if !ready {
            self.wants_area = self.lines < self.lines_limit;
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
        (self.lines_limit, self.areas_limit) = (0, 0);
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
                self.direction.touches(self.areas, true);
                self.areas += 1;
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
            if !self.credit(true)? {
                return Ok(None);
            }
            self.reserved = true;
        }
        self.direction.touches(self.areas, true);
        let area = self.direction.area(self.areas);
        // SAFETY: the area has `max_message` bytes, and it is ours alone until `commit`: the receiver has freed it (credit).
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(area, self.direction.layout.max_message) }))
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
        let data = unsafe { std::slice::from_raw_parts(self.direction.area(self.areas), len) };
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
            if !self.credit(false)? {
                return Ok(false);
            }
            self.publish(header, Some(pack(data)))?;
            return Ok(true);
        }
        if !self.credit(true)? {
            return Ok(false);
        }
        // SAFETY: the area has `max_message >= data.len()` bytes and is ours alone (credit).
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.direction.area(self.areas), data.len()) };
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
        let ready = self.refresh(self.wants_area)?;
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
