//! Reading of fragments and control frames from a stream.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::rails::data::control::Kind;
use crate::rails::data::frame::{COPIED, Frame};
use crate::rails::data::receiver::{ReceiveQueue, Target};
use crate::rails::data::side::{Directed, Side};
use crate::rails::failover::slot::State;
use crate::rails::failover::unacked::Counted;
use crate::rails::stream::Stream;
use crate::rails::worker::service::Remaining;
use crate::seal::Fault;

/// Bytes that a stream reads in its time slice, before others of its thread have theirs.
const TURN: usize = 2 << 20;
/// Bytes that a stream reads ahead, before it knows a buffer for them.
const AHEAD: usize = 16 << 10;
/// Time that a fragment waits in the kernel for its receive: to read it before costs an allocation and a second copy.
const PATIENCE: Duration = Duration::from_millis(1);

/// Receiving state of a stream.
#[derive(Debug, Default)]
pub(in crate::rails) struct Reader {
    /// Read ahead: the bytes from `from` to `to`.
    ahead: Vec<u8>,
    from: usize,
    to: usize,
    /// The fragment that is being read, and how much of it is here.
    fragment: Option<(Frame, Target, usize)>,
    /// The next fragment waits for its receive until then.
    held: Option<Instant>,
    counted: Counted,
    ended: bool,
}

impl Reader {
    /// Forgets everything: the owner's memory is not touched any more.
    pub(in crate::rails) fn clear(&mut self) {
        *self = Reader { ended: self.ended, ..Reader::default() };
    }

    /// Stops reading, as the sender has retired the stream, and replies; others bring what has not come whole.
    pub(in crate::rails) fn retire(&mut self, connection: &impl Directed, index: usize) {
        let Side::In(receiver) = connection.side() else { return };
        self.ended = true;
        if let Some((frame, target, _)) = self.fragment.take() {
            receiver.discard(&frame, &target);
        }
        receiver.repeat_window_updates();
        receiver.send_all_cts(connection);
        connection.send_control(vec![Frame::control(Kind::RetireAck, index as i32, self.counted.fragments())]);
        connection.resend_control();
    }

    /// Reads until nothing is there or the time slice is over. `hung_up`: the peer is known to have closed.
    pub(in crate::rails) fn pump(&mut self, connection: &impl Directed, stream: usize, hung_up: bool) -> Remaining {
        let Some(socket) = connection.stream(stream) else { return Remaining::Nothing };
        let (mut read, mut drained) = (0, false);
        while !self.ended {
            if connection.session().is_closed() {
                self.discard(socket);
                return Remaining::Nothing;
            }
            if let Err(detail) = self.parse(connection, (stream, socket)) {
                connection.fail(format!("stream {stream}: {detail}"));
                self.ended = true;
                return Remaining::Nothing;
            }
            if let Some(until) = self.held {
                return Remaining::Held(until);
            }
            // The kernel had no more: the next event says when it has.
            if drained {
                return Remaining::Nothing;
            }
            if read >= TURN {
                return Remaining::More;
            }
            match self.read(socket) {
                Ok((0, _)) => self.end(connection, stream, None),
                Ok((n, room)) => {
                    read += n;
                    if connection.session().relayed() {
                        socket.probe.count_received();
                    }
                    drained = n < room && !hung_up;
                }
                Err(Fault::AGAIN) => return Remaining::Nothing,
                Err(Fault::INTR) => {}
                Err(e) => self.end(connection, stream, Some(e)),
            }
        }
        Remaining::Nothing
    }

    #[cold]
    fn end(&mut self, connection: &impl Directed, stream: usize, error: Option<Fault>) {
        self.ended = true;
        let within = match &self.fragment {
            Some((frame, _, at)) => format!(" after {at} of {} bytes of a fragment", frame.len),
            None if self.to > self.from => " within a frame".to_owned(),
            None => String::new(),
        };
        match error {
            None if within.is_empty() => connection.end_of_stream(stream),
            None => connection.fail_stream(stream, format!("the peer closed it{within}")),
            Some(e) => connection.fail_stream(stream, format!("reading{within}: {e}")),
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
    fn target(&mut self, receiver: &ReceiveQueue, stream: usize, frame: &Frame) -> Result<Option<Target>, String> {
        let whole = self.to - self.from >= Frame::BYTES + frame.len as usize;
        if self.held.is_some_and(|until| until <= Instant::now()) {
            receiver.mark_late(frame.tag);
        }
        let target = receiver.target(frame, (!whole).then_some(stream))?;
        self.held = target.is_none().then(|| self.held.unwrap_or_else(|| Instant::now() + PATIENCE));
        Ok(target)
    }

    /// True at the end of the stream.
    pub(in crate::rails) fn is_over(&self) -> bool {
        self.ended
    }

    /// Reads once: returns the bytes that came, and the bytes that there was room for.
    fn read(&mut self, socket: &Stream) -> Result<(usize, usize), Fault> {
        if self.ahead.is_empty() {
            self.ahead.resize(AHEAD, 0);
        }
        if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let ahead = self.ahead.get_mut(self.to..).unwrap_or_default();
        let Some((frame, target, at)) = &mut self.fragment else {
            let room = ahead.len();
            let n = socket.recv(ahead, &mut [])?;
            self.to += n;
            return Ok((n, room));
        };
        // The fragment takes all that was read ahead before more is read.
        let rest = frame.len as usize - *at;
        let n = match target {
            Target::Posted(buffer) => {
                // SAFETY: within the posted memory, by `PostedBuffer::check`; no other fragment has this part of it,
                // and the owner does not use it before the request is done or the connection is closed, which takes
                // this lock.
                let memory =
                    unsafe { std::slice::from_raw_parts_mut(buffer.data.add(frame.offset as usize + *at), rest) };
                socket.recv(memory, ahead)
            }
            Target::Early(data) => {
                data.resize(frame.len as usize, 0);
                let memory = data.get_mut(*at..).unwrap_or_default();
                socket.recv(memory, ahead)
            }
        }?;
        let room = rest + ahead.len();
        let own = n.min(rest);
        *at += own;
        self.to += n - own;
        Ok((n, room))
    }

    /// Takes frames and short fragments out of what was read ahead, until more is needed.
    fn parse(&mut self, connection: &impl Directed, (index, stream): (usize, &Stream)) -> Result<(), String> {
        loop {
            if let Some((frame, target, at)) = &mut self.fragment {
                let rest = frame.len as usize - *at;
                let here = rest.min(self.to - self.from);
                let bytes = self.ahead.get(self.from..self.from + here).unwrap_or_default();
                match target {
                    Target::Posted(buffer) => {
                        // SAFETY: as in `read`; the bytes are ours.
                        unsafe {
                            let memory = buffer.data.add(frame.offset as usize + *at);
                            std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory, bytes.len());
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
                if let (Some((frame, target, _)), Side::In(receiver)) = (self.fragment.take(), connection.side()) {
                    receiver.arrived(connection, frame, target)?;
                    if let Some(fragments) = self.counted.read(frame.len <= COPIED as u64)
                        && connection.session().several()
                    {
                        stream.acknowledge.store(fragments, Ordering::Release);
                    }
                }
            }
            let Some(bytes) = self.ahead.get(self.from..self.to).and_then(|b| b.get(..Frame::BYTES)) else {
                return Ok(());
            };
            let frame = Frame::parse(bytes)?;
            if let (Side::In(receiver), None) = (connection.side(), frame.kind()) {
                let Some(target) = self.target(receiver, index, &frame)? else { return Ok(()) };
                connection.session().requests.begins(frame.total as usize);
                self.fragment = Some((frame, target, 0));
                self.from += Frame::BYTES;
                continue;
            }
            self.from += Frame::BYTES;
            match (connection.side(), frame.kind()) {
                (Side::Out(sender), Some(Kind::WindowUpdate)) => {
                    sender.handle_window_update(connection, frame.tag, frame.number)?
                }
                (Side::Out(_), Some(Kind::Ack)) => connection.handle_ack(index, frame.number)?,
                (_, Some(Kind::Ping)) if connection.session().several() => {
                    stream.probe.pong();
                    connection.wake(index);
                }
                (_, Some(Kind::Pong)) if connection.session().several() => {}
                (Side::In(_), Some(Kind::Join)) => drop(stream.advance(State::Alive)),
                (Side::Out(sender), Some(Kind::Cts)) => sender.handle_cts(connection, &frame)?,
                (_, Some(kind)) => connection.handle_control(index, kind, &frame)?,
                (_, None) => return Err(format!("expected what this end receives, got {frame:x?}")),
            }
        }
    }
}
