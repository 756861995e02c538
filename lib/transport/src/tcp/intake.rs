//! Reads the streams of a link: to the caller's memory, or to the inbox.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::frame::{AHEAD, Inbox, TooLong};
use super::{CLOSED, Streams};
use crate::Peer;
use crate::seal::Fault;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;

/// The streams of a link as its receiving end reads them, and how they ended.
pub(super) struct Intake {
    streams: Arc<Streams>,
    pub(super) peer: Peer,
    max_message: usize,
    pub(super) inbox: Inbox,
    /// The message that goes straight to the caller, and how much of it has come.
    pub(super) direct: Option<Direct>,
    /// The first stream has ended; whole messages before that are still received.
    lost: Option<String>,
    /// Another one has ended within a message.
    cut: Option<String>,
    /// Bytes read so far.
    pub(super) bytes: u64,
    /// The stream makes no sense any more.
    pub(super) broken: Option<Error>,
}

/// A message on its way to the caller.
#[derive(Debug, Clone, Copy)]
pub(super) struct Direct {
    pub(super) header: Header,
    pub(super) got: usize,
    /// True if it goes to `recv_chunks`.
    pub(super) in_chunks: bool,
}

/// Result of a read.
#[derive(Clone, Copy)]
pub(super) struct Read {
    /// Bytes that went to the caller's memory; the inbox has the others.
    pub(super) direct: usize,
    /// True if the kernel had fewer bytes than there was space for.
    pub(super) dry: bool,
}

impl Intake {
    pub(super) fn new(streams: Arc<Streams>, peer: Peer, max_message: usize, depth: usize) -> Result<Intake> {
        Ok(Intake {
            peer,
            max_message,
            inbox: Inbox::new(max_message, depth, streams.sockets.len())?,
            streams,
            direct: None,
            lost: None,
            cut: None,
            bytes: 0,
            broken: None,
        })
    }

    pub(super) fn too_long(&mut self, TooLong(header): TooLong) -> Error {
        let max = self.max_message;
        let error = self.peer.protocol("receive", format!("expected a message of up to {max} bytes, got {header}"));
        self.broken.insert(error).clone()
    }

    /// Reads once: to `dst` (empty: the unfinished message), and then ahead, where at most `limit` bytes are kept.
    /// `None` when nothing came.
    pub(super) fn read(&mut self, dst: &mut [u8], limit: usize) -> Result<Option<Read>> {
        if self.lost.is_some() {
            return Ok(None);
        }
        let own = dst.len();
        let (rest, ahead) = self.inbox.space(limit);
        let first = if dst.is_empty() { rest } else { dst };
        let room = first.len() + ahead.len();
        if room == 0 {
            // The kernel would answer 0, as at the end of the stream.
            return Ok(None);
        }
        let socket = self.streams.socket(0)?;
        match socket.recv(first, ahead) {
            Ok(0) => {
                let at = match (&self.direct, self.inbox.cut_off()) {
                    (Some(d), _) => format!(" after {} of {} bytes of a message", d.got, d.header.len),
                    (None, Some(at)) => format!(" {at}"),
                    (None, None) => String::new(),
                };
                self.lost = Some(format!("{CLOSED}{at}"));
            }
            Ok(n) => {
                self.bytes += n as u64;
                let direct = n.min(own);
                self.inbox.filled(n - direct);
                return Ok(Some(Read { direct, dry: n < room }));
            }
            Err(Fault::AGAIN | Fault::INTR) => {}
            Err(e) => self.lost = Some(e.to_string()),
        }
        Ok(None)
    }

    /// Reads once from a stream besides the first, to where its stripe of the message goes (empty `dst`: the unfinished
    /// one).
    pub(super) fn read_stripe(&mut self, stream: usize, dst: &mut [u8], len: usize) -> Result<bool> {
        let to = if dst.is_empty() { self.inbox.stripe(stream) } else { dst };
        if to.is_empty() || self.cut.is_some() {
            return Ok(false);
        }
        match self.streams.socket(stream)?.recv(to, &mut []) {
            Ok(0) => self.cut = Some(format!("{CLOSED} within a message of {len} bytes")),
            Ok(n) => {
                self.bytes += n as u64;
                self.inbox.stripes.advance(stream, n);
                return Ok(true);
            }
            Err(Fault::AGAIN | Fault::INTR) => {}
            Err(e) => self.cut = Some(e.to_string()),
        }
        Ok(false)
    }

    /// The stream that the message waits for which is being received.
    pub(super) fn waits_for(&self) -> usize {
        match &self.direct {
            Some(Direct { header, got, .. }) if *got >= self.inbox.stripes.first(header.len as usize) => {
                self.inbox.stripes.unfinished(header.len as usize).unwrap_or(0)
            }
            Some(_) => 0,
            None => self.inbox.waits_for().0,
        }
    }

    /// Takes in what has come until nothing is left or all slots are full. True when bytes came or a message became
    /// whole. An error of the stream is given once the whole messages before it are received.
    pub(super) fn fill(&mut self) -> Result<bool> {
        if self.direct.is_some() || self.broken.is_some() {
            return Ok(false);
        }
        let (mut moved, mut dry) = (false, false);
        loop {
            match self.inbox.digest()? {
                Ok(whole) => moved |= whole,
                Err(e) => {
                    self.too_long(e);
                    return Ok(moved);
                }
            }
            if dry || self.inbox.is_full() {
                return Ok(moved);
            }
            let (_, streams) = self.inbox.waits_for();
            let mut striped = false;
            for stream in 1..streams {
                striped |= self.read_stripe(stream, &mut [], 0)?;
            }
            if !striped {
                let Some(read) = self.read(&mut [], AHEAD)? else { return Ok(moved) };
                dry = read.dry;
            }
            moved = true;
        }
    }

    pub(super) fn alive(&self) -> Result<()> {
        // When the first stream has ended, the rest of a message may still be on its way on the others.
        match (&self.broken, &self.cut, &self.lost) {
            (Some(e), ..) => Err(e.clone()),
            (None, Some(detail), _) => Err(self.peer.lost("receive", detail)),
            (None, None, Some(detail)) if self.waits_for() == 0 => Err(self.peer.lost("receive", detail)),
            (None, None, _) => Ok(()),
        }
    }

    /// Finds out whether the stream that the message for the caller waits for has ended.
    pub(super) fn check_direct(&mut self) -> Result<()> {
        if self.direct.is_none() || self.lost.is_some() {
            return Ok(());
        }
        if self.has_opened() {
            return Ok(());
        }
        // Bytes that came before the end can still be received: only a connection without any is gone.
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.streams.socket(self.waits_for())?, &mut [0u8; 1], flags) {
            Ok((_, 0)) => self.lost = Some(CLOSED.to_owned()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => self.lost = Some(e.to_string()),
        }
        Ok(())
    }

    /// True if the stream that is waited for has bytes that no poll shows.
    pub(super) fn has_opened(&self) -> bool {
        self.streams.socket(self.waits_for()).is_ok_and(|socket| socket.has_opened())
    }

    /// The descriptor of the stream that is waited for.
    pub(super) fn fd(&self) -> Option<RawFd> {
        self.streams.socket(self.waits_for()).ok().map(|s| s.as_raw_fd())
    }
}
