//! The receiving end of a stream: what its caller asks for, and how much of it goes to the caller's memory at once.

use std::sync::Arc;

use super::Streams;
use super::frame::{AHEAD, Staged};
use super::intake::{Direct, Intake};
use crate::{Interest, Peer, Received, RecvLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;

/// Up to this length a message is read ahead together with its header and copied: a second read costs more.
const COPIED: usize = 16 << 10;

pub(super) struct TcpRecv {
    intake: Intake,
    /// Set when the caller got "not now" and will ask again: what comes can go straight to it and needs no slot. The
    /// value is the number of bytes that are worth reading ahead.
    asked: Option<usize>,
}

/// Location of the message that is asked for first.
enum Begin {
    /// All of it in a slot.
    Whole,
    /// In a slot, but not all of it.
    Unfinished(Header),
    /// Nothing of it in a slot.
    Fresh(Header),
    Not(Received),
}

impl TcpRecv {
    pub(super) fn new(streams: Arc<Streams>, peer: Peer, max_message: usize, depth: usize) -> Result<TcpRecv> {
        Ok(TcpRecv { intake: Intake::new(streams, peer, max_message, depth)?, asked: None })
    }

    /// Takes in what has come; where the caller will ask again, no more than a header and what comes with it.
    fn look(&mut self) -> Result<bool> {
        let Some(limit) = self.asked else { return self.intake.fill() };
        Ok(!self.intake.inbox.has_header() && self.intake.read(&mut [], limit)?.is_some())
    }

    /// Something to receive is here, or begins here.
    fn has_message(&self) -> bool {
        !self.intake.inbox.ready.is_empty() || (self.asked.is_some() && self.intake.inbox.has_header())
    }

    /// The header of the oldest message, of which nothing is staged; reads once at most.
    fn next_header(&mut self, limit: usize) -> Result<Option<Header>> {
        for read in [true, false] {
            match self.intake.inbox.header() {
                Ok(None) => {}
                Ok(header) => return Ok(header),
                Err(e) => return Err(self.intake.too_long(e)),
            }
            if read {
                self.intake.read(&mut [], limit)?;
            }
        }
        self.intake.alive()?;
        Ok(None)
    }

    /// Begins with the oldest message, or says why not. Reads at most `limit` bytes ahead to find out.
    fn begin(&mut self, expected: &Header, limit: usize) -> Result<Begin> {
        let agreed = |header: Header, begin: Begin| {
            if expected.agrees_with(&header) { begin } else { Begin::Not(Received::Mismatch(header)) }
        };
        self.asked = None;
        if let Some(staged) = self.intake.inbox.ready.front() {
            return Ok(agreed(staged.header, Begin::Whole));
        }
        if let Some(e) = &self.intake.broken {
            return Err(e.clone());
        }
        if let Some(header) = self.intake.inbox.unfinished() {
            return Ok(agreed(header, Begin::Unfinished(header)));
        }
        let Some(header) = self.next_header(limit)? else {
            self.asked = Some(limit);
            return Ok(Begin::Not(Received::Pending));
        };
        if !expected.agrees_with(&header) {
            self.intake.inbox.begin(header)?;
            self.intake.inbox.advance();
        }
        Ok(agreed(header, Begin::Fresh(header)))
    }

    /// The message that was begun before, if `expected` asks for it in the same way.
    fn resume(&self, expected: &Header, in_chunks: bool) -> Result<Option<Direct>> {
        match self.intake.direct {
            Some(d) if !expected.agrees_with(&d.header) || d.in_chunks != in_chunks => {
                let detail = format!("expected to go on with {} as before, was asked for {expected}", d.header);
                Err(self.intake.peer.misused_recv(detail))
            }
            direct => Ok(direct),
        }
    }

    /// Not all is here, or will ever be.
    fn pending(&self) -> Result<Received> {
        self.intake.alive().map(|()| Received::Pending)
    }

    /// Goes on with the message that goes straight to `dst`.
    fn receive(&mut self, header: Header, mut got: usize, dst: &mut [u8]) -> Result<Received> {
        let len = dst.len();
        let first = self.intake.inbox.stripes.first(len);
        loop {
            got += self.intake.inbox.take(dst.get_mut(got..first).unwrap_or_default());
            self.intake.direct = Some(Direct { header, got, in_chunks: false });
            for stream in 1..self.intake.inbox.stripes.count(len) {
                let rest = self.intake.inbox.stripes.rest(len, stream);
                if !rest.is_empty() {
                    self.intake.read_stripe(stream, dst.get_mut(rest).unwrap_or_default(), len)?;
                }
            }
            if got == first {
                if self.intake.inbox.stripes.unfinished(len).is_none() {
                    self.intake.direct = None;
                    return Ok(Received::Done);
                }
                return self.pending();
            }
            let rest = dst.get_mut(got..first).unwrap_or_default();
            let Some(read) = self.intake.read(rest, AHEAD)? else { return self.pending() };
            got += read.direct;
            if read.dry && got < first {
                self.intake.direct = Some(Direct { header, got, in_chunks: false });
                return Ok(Received::Pending);
            }
        }
    }

    /// Goes on with the message that is in a slot; true when it is whole.
    fn stage(&mut self) -> Result<bool> {
        self.intake.fill()?;
        if self.intake.inbox.ready.is_empty() {
            self.intake.alive()?;
        }
        Ok(!self.intake.inbox.ready.is_empty())
    }

    /// Goes on with the message that goes to `sink`.
    fn pass_on(&mut self, header: Header, mut got: usize, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        let len = header.len as usize;
        let mut dry = false;
        loop {
            got += self.intake.inbox.pass(got, len, sink);
            if got == len {
                self.intake.direct = None;
                return Ok(Received::Done);
            }
            self.intake.direct = Some(Direct { header, got, in_chunks: true });
            if dry {
                return Ok(Received::Pending);
            }
            let Some(read) = self.intake.read(&mut [], len - got + AHEAD)? else { return self.pending() };
            dry = read.dry;
        }
    }

    /// The oldest message, which is whole.
    fn payload(&self) -> &[u8] {
        self.intake.inbox.ready.front().map(Staged::payload).unwrap_or_default()
    }
}

impl RecvLink for TcpRecv {
    fn peer(&self) -> &Peer {
        &self.intake.peer
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        self.asked = None;
        if self.intake.inbox.ready.is_empty() {
            self.stage()?;
        }
        Ok(self.intake.inbox.ready.front().map(|staged| (staged.header, staged.payload())))
    }

    fn release(&mut self) -> Result<()> {
        self.intake.inbox.pop().map(drop).ok_or_else(|| self.intake.peer.not_peeked())
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(self.intake.peer.not_receivable(expected, dst));
        }
        if let Some(Direct { header, got, .. }) = self.resume(expected, false)? {
            return self.receive(header, got, dst);
        }
        let whole = Header::BYTES + dst.len();
        match self.begin(expected, if whole <= COPIED { whole + AHEAD } else { AHEAD })? {
            Begin::Whole => {
                dst.copy_from_slice(self.payload());
                self.intake.inbox.pop();
                Ok(Received::Done)
            }
            // Handing over every stripe's beginning gains too little.
            Begin::Unfinished(_) if self.intake.inbox.waits_for().1 > 1 => {
                if self.stage()? {
                    self.recv_into(expected, dst)
                } else {
                    Ok(Received::Pending)
                }
            }
            Begin::Unfinished(header) => {
                let got = self.intake.inbox.hand_over(dst);
                self.receive(header, got, dst)
            }
            Begin::Fresh(header) => self.receive(header, 0, dst),
            Begin::Not(received) => Ok(received),
        }
    }

    fn recv_chunks(&mut self, expected: &Header, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        if let Some(Direct { header, got, .. }) = self.resume(expected, true)? {
            return self.pass_on(header, got, sink);
        }
        match self.begin(expected, Header::BYTES + expected.len as usize + AHEAD)? {
            Begin::Whole => {
                sink(0, self.payload());
                self.intake.inbox.pop();
                return Ok(Received::Done);
            }
            Begin::Fresh(header) if self.intake.inbox.stripes.count(header.len as usize) == 1 => {
                return self.pass_on(header, 0, sink);
            }
            // Stripes come at the same time and not in order: chunks are made of the whole.
            Begin::Fresh(header) => self.intake.inbox.begin(header)?,
            // The rest of it is taken to where its beginning is.
            Begin::Unfinished(_) => {}
            Begin::Not(received) => return Ok(received),
        }
        if self.stage()? { self.recv_chunks(expected, sink) } else { Ok(Received::Pending) }
    }

    fn progress(&mut self) -> Result<bool> {
        let moved = self.look()?;
        if !moved && !self.has_message() {
            self.intake.alive()?;
        }
        Ok(moved)
    }

    fn check_peer(&mut self) -> Result<()> {
        self.look()?;
        self.intake.check_direct()?;
        if self.has_message() { Ok(()) } else { self.intake.alive() }
    }

    fn arm(&mut self) -> Result<bool> {
        if self.intake.direct.is_some() {
            // What is in the kernel wakes the poll at once.
            return self.intake.alive().map(|()| self.intake.has_opened());
        }
        self.progress()?;
        Ok(self.has_message() || self.intake.has_opened())
    }

    fn bytes_moved(&self) -> u64 {
        self.intake.bytes
    }

    fn interest(&self) -> Interest {
        Interest { fd: self.intake.fd(), readable: true, writable: false }
    }
}
