//! The receiving end of a stream.

use std::fmt;
use std::io::IoSliceMut;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::frame::{Inbox, TooLong};
use super::{CLOSED, Stream};
use crate::error::{Error, Result};
use crate::transport::{Interest, Peer, Received, RecvLink};
use crate::wire::Header;

pub(super) struct TcpRecv {
    stream: Arc<Stream>,
    peer: Peer,
    max_message: usize,
    inbox: Inbox,
    /// The message that goes straight to the caller's memory, and how much of it is there.
    direct: Option<(Header, usize)>,
    /// The stream has ended; whole messages before that are still received.
    lost: Option<String>,
    /// Read so far.
    bytes: u64,
    /// The stream makes no sense any more.
    broken: Option<Error>,
}

/// What a read came to.
enum Read {
    /// Bytes, and whether the kernel had fewer than there was room for.
    Bytes(usize, bool),
    Nothing,
}

impl TcpRecv {
    pub(super) fn new(stream: Arc<Stream>, peer: Peer, max_message: usize, depth: usize) -> TcpRecv {
        TcpRecv {
            stream,
            peer,
            max_message,
            inbox: Inbox::new(max_message, depth),
            direct: None,
            lost: None,
            bytes: 0,
            broken: None,
        }
    }

    fn misuse(&self, detail: String) -> Error {
        Error::invalid("receive", format!("from rank {}: {detail}", self.peer.peer))
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

    /// Reads once, to `dst` (the caller's memory; empty: the unfinished message) and ahead.
    fn read(&mut self, dst: &mut [u8]) -> Result<Read> {
        if self.lost.is_some() {
            return Ok(Read::Nothing);
        }
        let (rest, ahead) = self.inbox.space();
        let first = if dst.is_empty() { rest } else { dst };
        let room = first.len() + ahead.len();
        let mut parts = [IoSliceMut::new(first), IoSliceMut::new(ahead)];
        let skip = usize::from(parts[0].is_empty());
        let result = rustix::io::readv(self.stream.socket()?, parts.get_mut(skip..).unwrap_or_default());
        match result {
            Ok(0) => {
                let at = match (&self.direct, self.inbox.cut_off()) {
                    (Some((h, got)), _) => format!(" after {got} of {} bytes of a message", h.len),
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
            match self.read(&mut [])? {
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

    fn alive(&self) -> Result<()> {
        match (&self.broken, &self.lost) {
            (Some(e), _) => Err(e.clone()),
            (None, Some(detail)) => Err(self.peer.lost("receive", detail)),
            (None, None) => Ok(()),
        }
    }

    /// The header of the oldest message, of which nothing is staged; reads once at most.
    fn next_header(&mut self) -> Result<Option<Header>> {
        for read in [true, false] {
            match self.inbox.header() {
                Ok(None) => {}
                Ok(header) => return Ok(header),
                Err(e) => return Err(self.too_long(e)),
            }
            if read && let Read::Bytes(n, _) = self.read(&mut [])? {
                self.inbox.filled(n);
            }
        }
        self.alive()?;
        Ok(None)
    }

    /// Goes on with the message that goes straight to `dst`.
    fn receive(&mut self, header: Header, mut got: usize, dst: &mut [u8]) -> Result<Received> {
        loop {
            got += self.inbox.take(dst.get_mut(got..).unwrap_or_default());
            if got == dst.len() {
                self.direct = None;
                return Ok(Received::Done);
            }
            self.direct = Some((header, got));
            let rest = dst.get_mut(got..).unwrap_or_default();
            let room = rest.len();
            match self.read(rest)? {
                Read::Bytes(n, last) => {
                    got += n.min(room);
                    self.inbox.filled(n.saturating_sub(room));
                    if last && got < dst.len() {
                        self.direct = Some((header, got));
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
}

impl RecvLink for TcpRecv {
    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
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
            None => Err(self.misuse("expected a peeked message to release, got none".to_owned())),
        }
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if dst.len() != expected.len as usize {
            let got = dst.len();
            return Err(self.misuse(format!("expected memory for {expected}, got {got} bytes")));
        }
        if let Some((header, got)) = self.direct {
            if !expected.agrees_with(&header) {
                return Err(self.misuse(format!("expected to go on with {header}, was asked for {expected}")));
            }
            return self.receive(header, got, dst);
        }
        if let Some(staged) = self.inbox.ready.front() {
            if !expected.agrees_with(&staged.header) {
                return Ok(Received::Mismatch(staged.header));
            }
            dst.copy_from_slice(staged.payload());
            self.inbox.pop();
            return Ok(Received::Done);
        }
        if let Some(e) = &self.broken {
            return Err(e.clone());
        }
        if let Some(header) = self.inbox.unfinished() {
            if !expected.agrees_with(&header) {
                return Ok(Received::Mismatch(header));
            }
            let got = self.inbox.hand_over(dst);
            return self.receive(header, got, dst);
        }
        let Some(header) = self.next_header()? else { return Ok(Received::Pending) };
        if !expected.agrees_with(&header) {
            self.inbox.begin(header)?;
            self.inbox.advance();
            return Ok(Received::Mismatch(header));
        }
        self.receive(header, 0, dst)
    }

    fn progress(&mut self) -> Result<bool> {
        let moved = self.fill()?;
        if !moved && self.inbox.ready.is_empty() {
            self.alive()?;
        }
        Ok(moved)
    }

    fn check_peer(&mut self) -> Result<()> {
        self.fill()?;
        if self.direct.is_some() && self.lost.is_none() {
            // Bytes that came before the end can still be received: only a connection without any is gone.
            let mut byte = [0u8; 1];
            let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(self.stream.socket()?, &mut byte, flags) {
                Ok((_, 0)) => self.lost = Some(CLOSED.to_owned()),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => self.lost = Some(e.to_string()),
            }
        }
        if self.inbox.ready.is_empty() { self.alive() } else { Ok(()) }
    }

    fn arm(&mut self) -> Result<bool> {
        if self.direct.is_some() {
            // What is in the kernel wakes the poll at once.
            self.alive()?;
            return Ok(false);
        }
        self.progress()?;
        Ok(!self.inbox.ready.is_empty())
    }

    fn disarm(&mut self) {}

    fn bytes_moved(&self) -> u64 {
        self.bytes
    }

    fn interest(&self) -> Interest {
        Interest { fd: self.stream.socket().ok().map(|s| s.as_raw_fd()), readable: true, writable: false }
    }
}

impl fmt::Debug for TcpRecv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpRecv")
            .field("peer", &self.peer)
            .field("staged", &self.inbox.ready.len())
            .finish_non_exhaustive()
    }
}
