//! The sending end of a stream.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::net::SendFlags;

use super::frame::{Slot, Staged};
use super::stripes::Stripes;
use super::{CLOSED, Streams};
use crate::seal::Fault;
use crate::{Interest, Peer, SendLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// Header and payload of a message that is copied together.
const SMALL: usize = 2048;

pub(super) struct TcpSend {
    streams: Arc<Streams>,
    peer: Peer,
    max_message: usize,
    depth: usize,
    free: Vec<Slot>,
    reserved: Option<Slot>,
    /// Committed messages that the kernel has not taken whole, oldest first, and how much of the first one's header and
    /// first stripe it has.
    queue: VecDeque<Staged>,
    queue_sent: usize,
    /// Progress of the streams besides the first with the message that is being sent.
    stripes: Stripes,
    /// The message `send_from` has begun, and how much of its header and first stripe the kernel has.
    direct: Option<(Header, usize)>,
    /// The first stream for which the kernel took less than it was offered.
    blocked: Option<usize>,
    lost: Option<String>,
    /// Another message follows at once.
    more: bool,
    /// Buffer in which a small message is joined to its header.
    small: Box<[u8; SMALL]>,
    /// Bytes written so far.
    bytes: u64,
}

impl TcpSend {
    pub(super) fn new(streams: Arc<Streams>, peer: Peer, max_message: usize, depth: usize) -> TcpSend {
        TcpSend {
            stripes: Stripes::new(streams.sockets.len()),
            streams,
            peer,
            max_message,
            depth,
            free: Vec::new(),
            reserved: None,
            queue: VecDeque::new(),
            queue_sent: 0,
            direct: None,
            blocked: None,
            lost: None,
            more: false,
            small: Box::new([0; SMALL]),
            bytes: 0,
        }
    }

    fn alive(&self) -> Result<()> {
        match &self.lost {
            Some(detail) => Err(self.peer.lost("send", detail)),
            None => Ok(()),
        }
    }

    /// Offers the kernel what is left of a message of which it has `sent` bytes of header and first stripe; returns how
    /// much of these it has now, and whether it has everything.
    fn offer(&mut self, header: &Header, data: &[u8], sent: usize) -> Result<(usize, bool)> {
        if sent == 0 {
            self.stripes.reset();
        }
        self.blocked = None;
        let first = self.stripes.first(data.len());
        let head = bytemuck::bytes_of(header).get(sent..).unwrap_or_default();
        let body = data.get(sent.saturating_sub(Header::BYTES)..first).unwrap_or_default();
        let whole = Header::BYTES + first;
        let sent = if sent < whole { sent + self.write(0, head, body)? } else { sent };
        // The receiver reads the others once it has the header.
        if sent >= Header::BYTES {
            for stream in 1..self.stripes.count(data.len()) {
                let rest = data.get(self.stripes.rest(data.len(), stream)).unwrap_or_default();
                if !rest.is_empty() {
                    let n = self.write(stream, &[], rest)?;
                    self.stripes.advance(stream, n);
                }
            }
        }
        Ok((sent, sent == whole && self.stripes.unfinished(data.len()).is_none()))
    }

    /// Writes once to a stream; how much the kernel has taken.
    fn write(&mut self, stream: usize, head: &[u8], data: &[u8]) -> Result<usize> {
        let socket = self.streams.socket(stream)?;
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // Segments are filled up with the next message: the end of this one would be a small segment by itself. The
        // next one is sure to come on the first stream only.
        flags.set(SendFlags::MORE, self.more && stream == 0);
        // One buffer costs the kernel less than two: more than a copy of a few lines does.
        let result = match (head.len(), self.small.get_mut(..head.len() + data.len())) {
            (1.., Some(small)) => {
                let (front, back) = small.split_at_mut(head.len());
                front.copy_from_slice(head);
                back.copy_from_slice(data);
                socket.send(small, &[], flags)
            }
            _ => socket.send(head, data, flags),
        };
        let taken = match result {
            Ok(n) => n,
            Err(Fault::AGAIN) => 0,
            // Asking again at once is not wrong.
            Err(Fault::INTR) => return Ok(0),
            Err(e) => {
                self.lost = Some(if e == Fault::PIPE { CLOSED.to_owned() } else { e.to_string() });
                return self.alive().map(|()| 0);
            }
        };
        self.bytes += taken as u64;
        if taken < head.len() + data.len() {
            self.blocked = self.blocked.or(Some(stream));
        }
        Ok(taken)
    }

    /// Sends committed messages while the kernel takes them.
    fn flush(&mut self) -> Result<bool> {
        let mut moved = false;
        if self.direct.is_some() {
            return Ok(false);
        }
        while let Some(staged) = self.queue.pop_front() {
            let before = self.bytes;
            let result = self.offer(&staged.header, staged.payload(), self.queue_sent);
            moved |= self.bytes > before;
            match result {
                Ok((_, true)) => self.queue_sent = 0,
                partly => {
                    self.queue.push_front(staged);
                    self.queue_sent = partly?.0;
                    break;
                }
            }
            self.free.extend(staged.slot);
        }
        Ok(moved)
    }
}

impl SendLink for TcpSend {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        self.alive()?;
        if self.reserved.is_none() {
            if self.queue.len() >= self.depth {
                self.flush()?;
            }
            if self.queue.len() >= self.depth || self.direct.is_some() {
                return Ok(None);
            }
            self.reserved = Some(match self.free.pop() {
                Some(slot) => slot,
                None => Slot::new(self.max_message)?,
            });
        }
        Ok(self.reserved.as_mut().and_then(|slot| slot.bytes_mut().get_mut(..self.max_message)))
    }

    fn commit(&mut self, header: &Header) -> Result<()> {
        self.alive()?;
        let slot = match self.reserved.take() {
            Some(slot) if header.len as usize <= self.max_message => slot,
            other => {
                self.reserved = other;
                return Err(self.peer.not_reserved(header, self.max_message));
            }
        };
        self.queue.push_back(Staged { header: *header, slot: Some(slot) });
        self.flush().map(drop)
    }

    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        self.alive()?;
        if data.len() != header.len as usize || data.len() > self.max_message || self.reserved.is_some() {
            return Err(self.peer.not_sendable(header, data, self.max_message));
        }
        let sent = match self.direct {
            Some((begun, _)) if begun != *header => {
                return Err(self.peer.misused_send(format!("expected the rest of {begun}, got {header}")));
            }
            Some((_, sent)) => sent,
            None => {
                if !self.queue.is_empty() {
                    self.flush()?;
                }
                if !self.queue.is_empty() {
                    return Ok(false);
                }
                0
            }
        };
        let (sent, done) = self.offer(header, data, sent)?;
        self.direct = (!done && sent > 0).then_some((*header, sent));
        self.more &= !done;
        Ok(done)
    }

    fn progress(&mut self) -> Result<bool> {
        self.alive()?;
        self.flush()
    }

    fn expect_more(&mut self) {
        self.more = true;
    }

    fn sends_from_caller(&self, _bytes: usize) -> bool {
        true
    }

    fn is_flushed(&self) -> bool {
        self.queue.is_empty() && self.direct.is_none()
    }

    fn check_peer(&mut self) -> Result<()> {
        if self.lost.is_none() {
            self.lost = self.streams.broken();
        }
        self.alive()
    }

    fn arm(&mut self) -> Result<bool> {
        let moved = self.progress()?;
        Ok(moved || self.blocked.is_none())
    }

    fn bytes_moved(&self) -> u64 {
        self.bytes
    }

    fn interest(&self) -> Interest {
        let fd = self.streams.socket(self.blocked.unwrap_or(0)).ok().map(|s| s.as_raw_fd());
        Interest { fd, readable: false, writable: self.blocked.is_some() }
    }
}

impl Drop for TcpSend {
    fn drop(&mut self) {
        if self.lost.is_none() && self.flush().is_ok() && !self.is_flushed() {
            let messages = self.queue.len() + usize::from(self.direct.is_some());
            log::debug!("tcp: a link to rank {} was dropped with {messages} unsent messages", self.peer.peer);
        }
        for socket in &self.streams.sockets {
            // Fails when the connection is gone already.
            let _ = socket.shutdown(Shutdown::Write);
        }
    }
}
