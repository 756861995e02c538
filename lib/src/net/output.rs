//! Writing of fragments and control frames to a stream, and the fragments that the peer has not acknowledged yet.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::frame::{Frame, Word};
use super::link::{Left, Link, Side};
use super::outgoing::{Bytes, Piece, Source, WHOLE};
use super::stream::{State, Stream};

/// Longest fragment that is copied behind its header, as one buffer costs the kernel less than two, and that is
/// acknowledged with others.
pub(super) const COPIED: usize = 2 << 10;
/// Bytes that a stream writes in its time slice, before others of its thread have theirs.
const TURN: usize = 2 << 20;

/// Bytes in flight that a fragment of `len` bytes counts for; 0 for short ones, which are acknowledged late, with
/// others.
fn counted(len: usize) -> usize {
    if len > COPIED { len } else { 0 }
}

/// Sending state of a stream, with the fragments that the peer has not acknowledged yet.
#[derive(Debug)]
pub(super) struct Output {
    /// Bytes of a frame, and what was copied behind it.
    head: Vec<u8>,
    head_at: usize,
    /// The rest of the fragment, where the caller has it.
    data: Source,
    len: usize,
    at: usize,
    /// The request that it belongs to, and how much of it is over when it is written.
    done: Option<(usize, usize)>,
    /// True for a fragment, false for a control frame.
    piece: bool,
    blocked: bool,
    /// Fragments that were begun, oldest first, where the link has several rails; and how many went before these.
    sent: VecDeque<Piece>,
    read: u64,
}

impl Default for Output {
    fn default() -> Self {
        Output {
            head: Vec::new(),
            head_at: 0,
            data: Source(std::ptr::null()),
            len: 0,
            at: 0,
            done: None,
            piece: false,
            blocked: false,
            sent: VecDeque::new(),
            read: 0,
        }
    }
}

impl Output {
    /// Returns the state of a stream that replaces a lost one: its first bytes report that this end has it, and which
    /// queue pair beside it.
    pub(super) fn joining(index: usize, card: Option<Frame>) -> Output {
        let words: Vec<Frame> = [Frame::say(Word::Joined, index as i32, 0)].into_iter().chain(card).collect();
        let head = bytemuck::cast_slice(&words).to_vec();
        Output { head, ..Output::default() }
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.blocked && self.is_written()
    }

    fn is_written(&self) -> bool {
        self.head_at == self.head.len() && self.at == self.len
    }

    /// The socket takes more again.
    pub(super) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Forgets the fragment; true when there was none.
    pub(super) fn clear(&mut self) -> bool {
        let whole = self.is_written();
        *self = Output::default();
        whole
    }

    /// Writes until there is nothing of at most `most` bytes, the kernel takes no more, or the time slice is over.
    pub(super) fn pump(&mut self, link: &Arc<Link>, index: usize, most: usize) -> Left {
        let Some(stream) = link.stream(index) else { return Left::Nothing };
        let mut written = 0;
        while !self.blocked && !link.is_closed() && stream.is(State::Alive) {
            if self.is_idle() {
                if written >= TURN {
                    return Left::More;
                }
                if !self.load(link, (index, stream), most) {
                    return Left::Nothing;
                }
            }
            match self.write(stream) {
                Ok(n) => written += n,
                Err(Errno::AGAIN) => self.blocked = true,
                Err(Errno::INTR) => {}
                Err(e) => {
                    link.lose(index, format!("writing: {}", std::io::Error::from(e)));
                    return Left::Nothing;
                }
            }
            if self.is_written()
                && let Some((slot, amount)) = self.done.take()
                && let Some(request) = link.requests.get(slot)
            {
                request.finish(amount);
            }
        }
        Left::Nothing
    }

    /// Loads the next frame or fragment to write; false if there is none.
    fn load(&mut self, link: &Arc<Link>, (index, stream): (usize, &Stream), most: usize) -> bool {
        self.head.clear();
        (self.head_at, self.at, self.len, self.piece) = (0, 0, 0, false);
        if link.relayed()
            && let Some(word) = stream.echo.word()
        {
            self.head.extend(bytemuck::bytes_of(&Frame::say(word, 0, 0)));
            return true;
        }
        if link.spares(stream) {
            return false;
        }
        if let Some(word) = link.word() {
            if !stream.is(State::Alive) {
                // Control frames that were lost with it are sent again after the loss, but this one may have been among
                // them.
                link.say(vec![word]);
                return false;
            }
            self.head.extend(bytemuck::bytes_of(&word));
            return true;
        }
        match &link.side {
            Side::In(incoming) => {
                let pieces = if link.several() { stream.acknowledge.swap(0, Ordering::AcqRel) } else { 0 };
                let read = (pieces > 0).then(|| Frame::say(Word::Read, 0, pieces));
                let Some(frame) = read.or_else(|| incoming.report()) else { return false };
                self.head.extend(bytemuck::bytes_of(&frame));
            }
            Side::Out(outgoing) => {
                if link.several()
                    && outgoing.waiting.load(Ordering::Acquire) > 0
                    && let Err(other) = link.turn(index, WHOLE)
                {
                    link.wake_beside(other);
                    return false;
                }
                let Some(piece) = outgoing.take(most) else { return false };
                self.begin(piece, link.several().then_some(stream));
            }
        }
        true
    }

    /// Begins to write a fragment. With `acknowledged` it is kept until the peer has read it from that stream.
    fn begin(&mut self, piece: Piece, acknowledged: Option<&Stream>) {
        let len = piece.len();
        self.head.extend(bytemuck::bytes_of(&piece.frame));
        (self.done, self.piece) = (piece.share(), true);
        let copied = match &piece.bytes {
            Bytes::Copied(bytes) => {
                self.head.extend(bytes);
                true
            }
            Bytes::Posted(_, data) if len <= COPIED && len > 0 => {
                // SAFETY: part of a posted send, valid until its request is done, which is after this is written.
                self.head.extend(unsafe { std::slice::from_raw_parts(data.0, len) });
                true
            }
            Bytes::Posted(_, data) => {
                (self.data, self.len) = (*data, len);
                len == 0
            }
        };
        let Some(stream) = acknowledged else { return };
        stream.load.leave(counted(len));
        self.sent.push_back(if copied {
            // A short message is done when it is written: a message more for each would cost more than the copy.
            let bytes = self.head.get(Frame::BYTES..).unwrap_or_default().to_vec();
            Piece { frame: piece.frame, bytes: Bytes::Copied(bytes) }
        } else {
            self.done = None;
            piece
        });
    }

    /// Takes in that the peer has read `pieces` fragments from this stream in all.
    pub(super) fn read(&mut self, link: &Link, stream: &Stream, pieces: u64) -> Result<(), String> {
        let written = self.read + self.sent.len() as u64 - u64::from(self.piece && !self.is_written());
        if pieces > written {
            return Err(format!("expected at most {written} pieces to be read, got {pieces}"));
        }
        let mut bytes = 0;
        while self.read < pieces
            && let Some(piece) = self.sent.pop_front()
        {
            self.read += 1;
            bytes += counted(piece.len());
            if let Some((slot, amount)) = piece.share()
                && let Some(request) = link.requests.get(slot)
            {
                request.finish(amount);
            }
        }
        stream.load.arrive(bytes);
        Ok(())
    }

    /// The fragments of a lost stream, which others take.
    pub(super) fn leave(&mut self, link: &Link, stream: &Stream) -> VecDeque<Piece> {
        stream.load.forget(self.sent.iter().map(|piece| counted(piece.len())).sum());
        if let Some((slot, amount)) = self.done.take()
            && let Some(request) = link.requests.get(slot)
        {
            // It was copied, and is not needed any more.
            request.finish(amount);
        }
        std::mem::take(self).sent
    }

    fn write(&mut self, socket: &impl AsFd) -> Result<usize, Errno> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let head = self.head.get(self.head_at..).unwrap_or_default();
        let n = if self.at == self.len {
            rustix::net::send(socket, head, flags)?
        } else {
            // SAFETY: the part from `at` on of a posted send, valid until its request is done, which is after this is
            // written; a link that is closed writes no more.
            let data = unsafe { std::slice::from_raw_parts(self.data.0.add(self.at), self.len - self.at) };
            if head.is_empty() {
                rustix::net::send(socket, data, flags)?
            } else {
                let parts = [IoSlice::new(head), IoSlice::new(data)];
                rustix::net::sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), flags)?
            }
        };
        let of_head = n.min(head.len());
        self.head_at += of_head;
        self.at += n - of_head;
        Ok(n)
    }
}
