//! The receiving end of a stream.

use std::io::IoSliceMut;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::frame::{AHEAD, Inbox, Staged, TooLong};
use super::{CLOSED, Streams};
use crate::error::{Error, Result};
use crate::transport::{Interest, Peer, Received, RecvLink};
use crate::wire::Header;

/// Up to this length a message is read ahead together with its header and copied: a second read costs more.
const COPIED: usize = 16 << 10;

pub(super) struct TcpRecv {
    streams: Arc<Streams>,
    peer: Peer,
    max_message: usize,
    inbox: Inbox,
    /// The message that goes straight to the caller, and how much of it has come.
    direct: Option<Direct>,
    /// The caller was told that nothing is here yet and will ask again: what comes can go straight to it and needs no slot,
    /// and so many bytes are worth reading ahead.
    asked: Option<usize>,
    /// The first stream has ended; whole messages before that are still received.
    lost: Option<String>,
    /// Another one has ended within a message.
    cut: Option<String>,
    /// Read so far.
    bytes: u64,
    /// The stream makes no sense any more.
    broken: Option<Error>,
}

/// A message on its way to the caller.
#[derive(Debug, Clone, Copy)]
struct Direct {
    header: Header,
    got: usize,
    /// To `recv_chunks`.
    in_chunks: bool,
}

/// Where the message is that is asked for first.
enum Begin {
    /// All of it in a slot.
    Whole,
    /// In a slot, but not all of it.
    Unfinished(Header),
    /// Nothing of it in a slot.
    Fresh(Header),
    Not(Received),
}

/// What a read came to.
enum Read {
    /// Bytes, and whether the kernel had fewer than there was room for.
    Bytes(usize, bool),
    Nothing,
}

impl TcpRecv {
    pub(super) fn new(streams: Arc<Streams>, peer: Peer, max_message: usize, depth: usize) -> Result<TcpRecv> {
        Ok(TcpRecv {
            peer,
            max_message,
            inbox: Inbox::new(max_message, depth, streams.sockets.len())?,
            streams,
            direct: None,
            asked: None,
            lost: None,
            cut: None,
            bytes: 0,
            broken: None,
        })
    }

    fn too_long(&mut self, TooLong(header): TooLong) -> Error {
        let max = self.max_message;
        let error = self.peer.protocol("receive", format!("expected a message of up to {max} bytes, got {header}"));
        self.broken.insert(error).clone()
    }

    /// The error is given once the whole messages before it are received.
    fn break_off(&mut self, e: TooLong, moved: bool) -> bool {
        let _ = self.too_long(e);
        moved
    }

    /// Reads once: to `dst` (empty: the unfinished message), and then ahead, where at most `limit` bytes are kept.
    fn read(&mut self, dst: &mut [u8], limit: usize) -> Result<Read> {
        if self.lost.is_some() {
            return Ok(Read::Nothing);
        }
        let (rest, ahead) = self.inbox.space(limit);
        let first = if dst.is_empty() { rest } else { dst };
        let room = first.len() + ahead.len();
        if room == 0 {
            // The kernel would answer 0, as at the end of the stream.
            return Ok(Read::Nothing);
        }
        let socket = self.streams.socket(0)?;
        // One place costs the kernel less than two.
        let result = match (first.is_empty(), ahead.is_empty()) {
            (true, _) => rustix::net::recv(socket, ahead, RecvFlags::DONTWAIT).map(|(n, _)| n),
            (_, true) => rustix::net::recv(socket, first, RecvFlags::DONTWAIT).map(|(n, _)| n),
            _ => rustix::io::readv(socket, &mut [IoSliceMut::new(first), IoSliceMut::new(ahead)]),
        };
        match result {
            Ok(0) => {
                let at = match (&self.direct, self.inbox.cut_off()) {
                    (Some(d), _) => format!(" after {} of {} bytes of a message", d.got, d.header.len),
                    (None, Some(at)) => format!(" {at}"),
                    (None, None) => String::new(),
                };
                self.lost = Some(format!("{CLOSED}{at}"));
                Ok(Read::Nothing)
            }
            Ok(n) => {
                self.bytes += n as u64;
                Ok(Read::Bytes(n, n < room))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Read::Nothing),
            Err(e) => {
                self.lost = Some(e.to_string());
                Ok(Read::Nothing)
            }
        }
    }

    /// Reads once from a stream besides the first, to where its stripe of the message goes (empty `dst`: the unfinished one).
    fn read_stripe(&mut self, stream: usize, dst: &mut [u8], len: usize) -> Result<bool> {
        let to = if dst.is_empty() { self.inbox.stripe(stream) } else { dst };
        if to.is_empty() || self.cut.is_some() {
            return Ok(false);
        }
        match rustix::net::recv(self.streams.socket(stream)?, to, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.cut = Some(format!("{CLOSED} within a message of {len} bytes")),
            Ok((_, n)) => {
                self.bytes += n as u64;
                self.inbox.stripes.advance(stream, n);
                return Ok(true);
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => self.cut = Some(e.to_string()),
        }
        Ok(false)
    }

    /// The stream that the message waits for which is being received.
    fn waits_for(&self) -> usize {
        match &self.direct {
            Some(Direct { header, got, .. }) if *got >= self.inbox.stripes.first(header.len as usize) => {
                self.inbox.stripes.unfinished(header.len as usize).unwrap_or(0)
            }
            Some(_) => 0,
            None => self.inbox.waits_for().0,
        }
    }

    /// Takes in what has come until nothing is left or all slots are full. True when bytes came or a message became whole.
    fn fill(&mut self) -> Result<bool> {
        if self.direct.is_some() || self.broken.is_some() {
            return Ok(false);
        }
        let mut moved = false;
        loop {
            match self.inbox.digest()? {
                Ok(whole) => moved |= whole,
                Err(e) => return Ok(self.break_off(e, moved)),
            }
            if self.inbox.is_full() {
                return Ok(moved);
            }
            let (_, streams) = self.inbox.waits_for();
            let mut striped = false;
            for stream in 1..streams {
                striped |= self.read_stripe(stream, &mut [], 0)?;
            }
            if striped {
                moved = true;
                continue;
            }
            match self.read(&mut [], AHEAD)? {
                Read::Bytes(n, last) => {
                    self.inbox.filled(n);
                    moved = true;
                    if last {
                        return match self.inbox.digest()? {
                            Ok(_) => Ok(true),
                            Err(e) => Ok(self.break_off(e, moved)),
                        };
                    }
                }
                Read::Nothing => return Ok(moved),
            }
        }
    }

    /// As [`TcpRecv::fill`]; where the caller will ask again, it takes in no more than a header and what comes with it.
    fn look(&mut self) -> Result<bool> {
        let Some(limit) = self.asked else { return self.fill() };
        if self.inbox.has_header() {
            return Ok(false);
        }
        match self.read(&mut [], limit)? {
            Read::Bytes(n, _) => {
                self.inbox.filled(n);
                Ok(true)
            }
            Read::Nothing => Ok(false),
        }
    }

    /// Something to receive is here, or begins here.
    fn has_message(&self) -> bool {
        !self.inbox.ready.is_empty() || (self.asked.is_some() && self.inbox.has_header())
    }

    fn alive(&self) -> Result<()> {
        // When the first stream has ended, the rest of a message may still be on its way on the others.
        match (&self.broken, &self.cut, &self.lost) {
            (Some(e), ..) => Err(e.clone()),
            (None, Some(detail), _) => Err(self.peer.lost("receive", detail)),
            (None, None, Some(detail)) if self.waits_for() == 0 => Err(self.peer.lost("receive", detail)),
            (None, None, _) => Ok(()),
        }
    }

    /// The header of the oldest message, of which nothing is staged; reads once at most.
    fn next_header(&mut self, limit: usize) -> Result<Option<Header>> {
        for read in [true, false] {
            match self.inbox.header() {
                Ok(None) => {}
                Ok(header) => return Ok(header),
                Err(e) => return Err(self.too_long(e)),
            }
            if read && let Read::Bytes(n, _) = self.read(&mut [], limit)? {
                self.inbox.filled(n);
            }
        }
        self.alive()?;
        Ok(None)
    }

    /// Begins with the oldest message, or says why not. Reads at most `limit` bytes ahead to find out.
    fn begin(&mut self, expected: &Header, limit: usize) -> Result<Begin> {
        self.asked = None;
        if let Some(staged) = self.inbox.ready.front() {
            let header = staged.header;
            return Ok(if expected.agrees_with(&header) {
                Begin::Whole
            } else {
                Begin::Not(Received::Mismatch(header))
            });
        }
        if let Some(e) = &self.broken {
            return Err(e.clone());
        }
        if let Some(header) = self.inbox.unfinished() {
            return Ok(if expected.agrees_with(&header) {
                Begin::Unfinished(header)
            } else {
                Begin::Not(Received::Mismatch(header))
            });
        }
        let Some(header) = self.next_header(limit)? else {
            self.asked = Some(limit);
            return Ok(Begin::Not(Received::Pending));
        };
        if !expected.agrees_with(&header) {
            self.inbox.begin(header)?;
            self.inbox.advance();
            return Ok(Begin::Not(Received::Mismatch(header)));
        }
        Ok(Begin::Fresh(header))
    }

    /// The message that was begun before, if `expected` asks for it in the same way.
    fn resume(&self, expected: &Header, in_chunks: bool) -> Result<Option<Direct>> {
        match self.direct {
            Some(d) if !expected.agrees_with(&d.header) || d.in_chunks != in_chunks => Err(self
                .peer
                .misused_recv(format!("expected to go on with {} as before, was asked for {expected}", d.header))),
            direct => Ok(direct),
        }
    }

    /// Goes on with the message that goes straight to `dst`.
    fn receive(&mut self, header: Header, mut got: usize, dst: &mut [u8]) -> Result<Received> {
        let len = dst.len();
        let first = self.inbox.stripes.first(len);
        loop {
            got += self.inbox.take(dst.get_mut(got..first).unwrap_or_default());
            self.direct = Some(Direct { header, got, in_chunks: false });
            for stream in 1..self.inbox.stripes.count(len) {
                let rest = self.inbox.stripes.rest(len, stream);
                if !rest.is_empty() {
                    self.read_stripe(stream, dst.get_mut(rest).unwrap_or_default(), len)?;
                }
            }
            if got == first {
                if self.inbox.stripes.unfinished(len).is_none() {
                    self.direct = None;
                    return Ok(Received::Done);
                }
                self.alive()?;
                return Ok(Received::Pending);
            }
            let rest = dst.get_mut(got..first).unwrap_or_default();
            let room = rest.len();
            match self.read(rest, AHEAD)? {
                Read::Bytes(n, last) => {
                    got += n.min(room);
                    self.inbox.filled(n.saturating_sub(room));
                    if last && got < first {
                        self.direct = Some(Direct { header, got, in_chunks: false });
                        return Ok(Received::Pending);
                    }
                }
                Read::Nothing => {
                    self.alive()?;
                    return Ok(Received::Pending);
                }
            }
        }
    }

    /// Goes on with the message that is in a slot; true when it is whole.
    fn stage(&mut self) -> Result<bool> {
        self.fill()?;
        if self.inbox.ready.is_empty() {
            self.alive()?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Goes on with the message that goes to `sink`.
    fn pass_on(&mut self, header: Header, mut got: usize, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        let len = header.len as usize;
        let mut dry = false;
        loop {
            got += self.inbox.pass(got, len, sink);
            if got == len {
                self.direct = None;
                return Ok(Received::Done);
            }
            self.direct = Some(Direct { header, got, in_chunks: true });
            if dry {
                return Ok(Received::Pending);
            }
            match self.read(&mut [], len - got + AHEAD)? {
                Read::Bytes(n, last) => {
                    self.inbox.filled(n);
                    dry = last;
                }
                Read::Nothing => {
                    self.alive()?;
                    return Ok(Received::Pending);
                }
            }
        }
    }
}

impl RecvLink for TcpRecv {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        self.asked = None;
        if self.inbox.ready.is_empty() {
            self.fill()?;
            if self.inbox.ready.is_empty() {
                self.alive()?;
            }
        }
        Ok(self.inbox.ready.front().map(|staged| (staged.header, staged.payload())))
    }

    fn release(&mut self) -> Result<()> {
        match self.inbox.pop() {
            Some(_) => Ok(()),
            None => Err(self.peer.not_peeked()),
        }
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            return Err(self.peer.not_receivable(expected, dst));
        }
        if let Some(Direct { header, got, .. }) = self.resume(expected, false)? {
            return self.receive(header, got, dst);
        }
        let whole = Header::BYTES + dst.len();
        match self.begin(expected, if whole <= COPIED { whole + AHEAD } else { AHEAD })? {
            Begin::Whole => {
                dst.copy_from_slice(self.inbox.ready.front().map(Staged::payload).unwrap_or_default());
                self.inbox.pop();
                Ok(Received::Done)
            }
            // Handing over every stripe's beginning gains too little.
            Begin::Unfinished(_) if self.inbox.waits_for().1 > 1 => {
                if self.stage()? {
                    self.recv_into(expected, dst)
                } else {
                    Ok(Received::Pending)
                }
            }
            Begin::Unfinished(header) => {
                let got = self.inbox.hand_over(dst);
                self.receive(header, got, dst)
            }
            Begin::Fresh(header) => self.receive(header, 0, dst),
            Begin::Not(received) => Ok(received),
        }
    }

    fn recv_chunks(&mut self, expected: &Header, sink: &mut dyn FnMut(usize, &[u8])) -> Result<Received> {
        let (header, got) = match self.resume(expected, true)? {
            Some(direct) => (direct.header, direct.got),
            None => match self.begin(expected, Header::BYTES + expected.len as usize + AHEAD)? {
                Begin::Whole => {
                    sink(0, self.inbox.ready.front().map(Staged::payload).unwrap_or_default());
                    self.inbox.pop();
                    return Ok(Received::Done);
                }
                Begin::Fresh(header) if self.inbox.stripes.count(header.len as usize) == 1 => (header, 0),
                // Stripes come at the same time and not in order: chunks are made of the whole.
                Begin::Fresh(header) => {
                    self.inbox.begin(header)?;
                    return if self.stage()? { self.recv_chunks(expected, sink) } else { Ok(Received::Pending) };
                }
                // The rest of it is taken to where its beginning is.
                Begin::Unfinished(_) => {
                    return if self.stage()? { self.recv_chunks(expected, sink) } else { Ok(Received::Pending) };
                }
                Begin::Not(received) => return Ok(received),
            },
        };
        self.pass_on(header, got, sink)
    }

    fn progress(&mut self) -> Result<bool> {
        let moved = self.look()?;
        if !moved && !self.has_message() {
            self.alive()?;
        }
        Ok(moved)
    }

    fn check_peer(&mut self) -> Result<()> {
        self.look()?;
        if self.direct.is_some() && self.lost.is_none() {
            // Bytes that came before the end can still be received: only a connection without any is gone.
            let mut byte = [0u8; 1];
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(self.streams.socket(self.waits_for())?, &mut byte, flags) {
                Ok((_, 0)) => self.lost = Some(CLOSED.to_owned()),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => self.lost = Some(e.to_string()),
            }
        }
        if self.has_message() { Ok(()) } else { self.alive() }
    }

    fn arm(&mut self) -> Result<bool> {
        if self.direct.is_some() {
            // What is in the kernel wakes the poll at once.
            self.alive()?;
            return Ok(false);
        }
        self.progress()?;
        Ok(self.has_message())
    }

    fn disarm(&mut self) {}

    fn bytes_moved(&self) -> u64 {
        self.bytes
    }

    fn interest(&self) -> Interest {
        let fd = self.streams.socket(self.waits_for()).ok().map(|s| s.as_raw_fd());
        Interest { fd, readable: true, writable: false }
    }
}
