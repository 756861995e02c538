//! Reading of fragments and control frames from a stream.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::frame::{Frame, Word};
use super::incoming::{Incoming, Target};
use super::link::{Left, Link, Side};
use super::output::COPIED;
use super::stream::{State, Stream};

/// Bytes that a stream reads in its time slice, before others of its thread have theirs.
const TURN: usize = 2 << 20;
/// Bytes that a stream reads ahead, before it knows a buffer for them.
const AHEAD: usize = 16 << 10;
/// Time that a fragment waits in the kernel for its receive: to read it before costs an allocation and a second copy.
const PATIENCE: Duration = Duration::from_millis(1);
/// Short fragments that are acknowledged together.
const SHORT_ONES: u64 = 16;

/// Receiving state of a stream.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// Read ahead: the bytes from `from` to `to`.
    ahead: Vec<u8>,
    from: usize,
    to: usize,
    /// The fragment that is being read, and how much of it is here.
    piece: Option<(Frame, Target, usize)>,
    /// The next fragment waits for its receive until then.
    held: Option<Instant>,
    /// Fragments that were read, and how many of them were acknowledged.
    pieces: u64,
    acknowledged: u64,
    ended: bool,
}

impl Input {
    /// Forgets everything: the owner's memory is not touched any more.
    pub(super) fn clear(&mut self) {
        *self = Input { ended: self.ended, ..Input::default() };
    }

    /// Stops reading, as the sender has left the stream; others bring what has not come whole. False if another stream
    /// has its position by now.
    pub(super) fn leave(&mut self, link: &Arc<Link>, index: usize) -> bool {
        let Side::In(incoming) = &link.side else { return false };
        if link.stream(index).is_none() {
            return false;
        }
        self.ended = true;
        if let Some((frame, target, _)) = self.piece.take() {
            incoming.forget(&frame, &target);
        }
        incoming.report_again();
        incoming.tell_rooms(link);
        link.say(vec![Frame::say(Word::Agreed, index as i32, self.pieces)]);
        link.restate();
        true
    }

    /// Reads until nothing is there or the time slice is over. `hung_up`: the peer is known to have closed.
    pub(super) fn pump(&mut self, link: &Arc<Link>, stream: usize, hung_up: bool) -> Left {
        let Some(socket) = link.stream(stream) else { return Left::Nothing };
        let (mut read, mut drained) = (0, false);
        while !self.ended {
            if link.is_closed() {
                self.discard(socket);
                return Left::Nothing;
            }
            if let Err(detail) = self.digest(link, (stream, socket)) {
                link.fail(format!("stream {stream}: {detail}"));
                self.ended = true;
                return Left::Nothing;
            }
            if let Some(until) = self.held {
                return Left::Held(until);
            }
            // The kernel had no more: the next event says when it has.
            if drained {
                return Left::Nothing;
            }
            if read >= TURN {
                return Left::More;
            }
            match self.read(socket) {
                Ok((0, _)) => self.end(link, stream, None),
                Ok((n, room)) => {
                    read += n;
                    if link.relayed() {
                        socket.echo.hears();
                    }
                    drained = n < room && !hung_up;
                }
                Err(Errno::AGAIN) => return Left::Nothing,
                Err(Errno::INTR) => {}
                Err(e) => self.end(link, stream, Some(std::io::Error::from(e))),
            }
        }
        Left::Nothing
    }

    #[cold]
    fn end(&mut self, link: &Arc<Link>, stream: usize, error: Option<std::io::Error>) {
        self.ended = true;
        let within = match &self.piece {
            Some((frame, _, at)) => format!(" after {at} of {} bytes of a piece", frame.len),
            None if self.to > self.from => " within a frame".to_owned(),
            None => String::new(),
        };
        match error {
            None if within.is_empty() => link.end_of_stream(stream),
            None => link.lose(stream, format!("the peer closed it{within}")),
            Some(e) => link.lose(stream, format!("reading{within}: {e}")),
        }
    }

    /// After the owner has gone: reads what comes, so that the kernel does not reset the connection.
    fn discard(&mut self, socket: &Stream) {
        let mut bytes = [0u8; 4096];
        loop {
            match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((1.., _)) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Ok((0, _)) | Err(_) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }

    /// Returns the buffer for the fragment behind a header; `None` while the fragment waits for its receive.
    fn target(&mut self, incoming: &Incoming, stream: usize, frame: &Frame) -> Result<Option<Target>, String> {
        let whole = self.to - self.from >= Frame::BYTES + frame.len as usize;
        if self.held.is_some_and(|until| until <= Instant::now()) {
            incoming.is_late(frame.tag);
        }
        let target = incoming.target(frame, (!whole).then_some(stream))?;
        self.held = target.is_none().then(|| self.held.unwrap_or_else(|| Instant::now() + PATIENCE));
        Ok(target)
    }

    /// True at the end of the stream.
    pub(super) fn is_over(&self) -> bool {
        self.ended
    }

    /// Reads once: returns the bytes that came, and the bytes that there was room for.
    fn read(&mut self, socket: &Stream) -> Result<(usize, usize), Errno> {
        if self.ahead.is_empty() {
            self.ahead.resize(AHEAD, 0);
        }
        if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let ahead = self.ahead.get_mut(self.to..).unwrap_or_default();
        let Some((frame, target, at)) = &mut self.piece else {
            let room = ahead.len();
            let (n, _) = rustix::net::recv(socket, ahead, RecvFlags::DONTWAIT)?;
            self.to += n;
            return Ok((n, room));
        };
        // The fragment takes all that was read ahead before more is read.
        let rest = frame.len as usize - *at;
        let n = match target {
            Target::Posted(entry) => {
                // SAFETY: within the posted memory, by `Entry::check`; no other fragment has this part of it, and the
                // owner does not use it before the request is done or the link is closed, which takes this lock.
                let place =
                    unsafe { std::slice::from_raw_parts_mut(entry.data.add(frame.offset as usize + *at), rest) };
                rustix::io::readv(socket, &mut [IoSliceMut::new(place), IoSliceMut::new(ahead)])
            }
            Target::Early(data) => {
                data.resize(frame.len as usize, 0);
                let place = data.get_mut(*at..).unwrap_or_default();
                rustix::io::readv(socket, &mut [IoSliceMut::new(place), IoSliceMut::new(ahead)])
            }
        }?;
        let room = rest + ahead.len();
        let own = n.min(rest);
        *at += own;
        self.to += n - own;
        Ok((n, room))
    }

    /// Takes frames and short fragments out of what was read ahead, until more is needed.
    fn digest(&mut self, link: &Arc<Link>, (index, stream): (usize, &Stream)) -> Result<(), String> {
        loop {
            if let Some((frame, target, at)) = &mut self.piece {
                let rest = frame.len as usize - *at;
                let here = rest.min(self.to - self.from);
                let bytes = self.ahead.get(self.from..self.from + here).unwrap_or_default();
                match target {
                    Target::Posted(entry) => {
                        // SAFETY: as in `read`; the bytes are ours.
                        unsafe {
                            let place = entry.data.add(frame.offset as usize + *at);
                            std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len());
                        }
                    }
                    Target::Early(_) if bytes.is_empty() => {}
                    Target::Early(data) => {
                        data.truncate(*at);
                        data.extend_from_slice(bytes);
                    }
                }
                *at += bytes.len();
                self.from += bytes.len();
                if *at < frame.len as usize {
                    return Ok(());
                }
                if let (Some((frame, target, _)), Side::In(incoming)) = (self.piece.take(), &link.side) {
                    incoming.arrived(link, frame, target)?;
                    self.pieces += 1;
                    if link.several() && (frame.len > COPIED as u64 || self.pieces - self.acknowledged >= SHORT_ONES) {
                        self.acknowledged = self.pieces;
                        stream.acknowledge.store(self.pieces, Ordering::Release);
                    }
                }
            }
            let Some(bytes) = self.ahead.get(self.from..self.to).and_then(|b| b.get(..Frame::BYTES)) else {
                return Ok(());
            };
            let frame = Frame::parse(bytes)?;
            if let (Side::In(incoming), None) = (&link.side, frame.word()) {
                let Some(target) = self.target(incoming, index, &frame)? else { return Ok(()) };
                link.requests.begins(frame.total as usize);
                self.piece = Some((frame, target, 0));
                self.from += Frame::BYTES;
                continue;
            }
            self.from += Frame::BYTES;
            match (&link.side, frame.word()) {
                (Side::Out(outgoing), Some(Word::Placed)) => outgoing.placed(link, frame.tag, frame.number)?,
                (Side::Out(outgoing), Some(Word::Read)) => outgoing.read(link, stream, frame.number)?,
                (_, Some(Word::Asked)) if link.several() => {
                    stream.echo.answer();
                    link.wake(index);
                }
                (_, Some(Word::Here)) if link.several() => {}
                (Side::In(_), Some(Word::Joined)) => drop(stream.becomes(State::Alive)),
                (Side::Out(outgoing), Some(Word::Room)) => outgoing.room(link, &frame)?,
                (_, Some(word @ (Word::Card | Word::Waits))) => link.rdma.heard(link, word, &frame)?,
                (_, Some(word)) if frame.queue().is_some() => link.rdma.heard(link, word, &frame)?,
                (_, Some(word)) => link.heard(index, word, &frame)?,
                (_, None) => return Err(format!("expected what this end receives, got {frame:x?}")),
            }
        }
    }
}
