//! A connection: its streams, what is posted on it, and how it ends.

use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::incoming::{Incoming, Input};
use super::outgoing::{Outgoing, Output};
use super::request::{Fate, MAX_GROUP, Request, Requests};
use super::worker::{Task, Worker, Workers};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::Kept;
use crate::threads::lock;

/// What a pump left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// Nothing to do before the next event or the next job.
    Nothing,
    /// More, after others had their turn.
    More,
}

/// One TCP connection of a link.
#[derive(Debug)]
pub(super) struct Stream {
    socket: Kept<TcpStream>,
    worker: Arc<Worker>,
    /// A [`Task::Work`] for it waits.
    pub(super) queued: AtomicBool,
    pub(super) output: Mutex<Output>,
    pub(super) input: Mutex<Input>,
}

impl Stream {
    /// Nothing comes any more, and nothing gets out; `how` much of that.
    fn shut(&self, how: Shutdown) {
        // Fails when the peer was first.
        let _ = self.socket.shutdown(how);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Which end it is.
#[derive(Debug)]
pub(super) enum Side {
    Out(Outgoing),
    In(Incoming),
}

/// A connection, shared by its owner and the threads that serve its streams.
#[derive(Debug)]
pub(super) struct Link {
    name: String,
    pub(super) streams: Box<[Stream]>,
    pub(super) side: Side,
    pub(super) requests: Requests,
    fate: Arc<Fate>,
    closed: AtomicBool,
    /// Streams at whose end the peer said so.
    ended: AtomicUsize,
    /// The stream that is woken next.
    next: AtomicUsize,
}

impl Link {
    pub(super) fn new(name: String, sockets: Vec<TcpStream>, side: Side, workers: &Workers) -> Result<Arc<Link>> {
        let fate = Arc::new(Fate::default());
        let stream = |socket| Stream {
            socket: Kept::new(socket),
            worker: workers.next(),
            queued: AtomicBool::new(false),
            output: Mutex::default(),
            input: Mutex::default(),
        };
        let link = Arc::new(Link {
            name,
            streams: sockets.into_iter().map(stream).collect(),
            side,
            requests: Requests::new(&fate, workers.activity()),
            fate,
            closed: AtomicBool::new(false),
            ended: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        });
        for (index, stream) in link.streams.iter().enumerate() {
            stream.worker.push(Task::Add(link.clone(), index));
        }
        Ok(link)
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Has a stream's thread look for something to send.
    pub(super) fn wake(self: &Arc<Link>, stream: usize) {
        if let Some(stream_of) = self.streams.get(stream)
            && !stream_of.queued.swap(true, Ordering::AcqRel)
        {
            stream_of.worker.push(Task::Work(self.clone(), stream));
        }
    }

    /// As [`Link::wake`] for so many streams, others each time.
    pub(super) fn wake_some(self: &Arc<Link>, streams: usize) {
        let all = self.streams.len();
        let some = streams.min(all);
        let first = self.next.fetch_add(some, Ordering::Relaxed);
        (0..some).for_each(|i| self.wake(first.wrapping_add(i) % all));
    }

    /// The end of everything on this link, for the reason `detail`.
    #[cold]
    pub(super) fn fail(&self, detail: String) {
        if self.is_closed() {
            return;
        }
        if self.fate.seal(self.error(detail)) {
            self.streams.iter().for_each(|s| s.shut(Shutdown::Both));
        }
    }

    fn error(&self, detail: String) -> Error {
        let op = match self.side {
            Side::Out(_) => "send",
            Side::In(_) => "receive",
        };
        Error::Connection { op: op.to_owned(), connection: self.name.clone(), detail }
    }

    /// The peer has closed a stream, between two pieces. What came over the others before still counts.
    #[cold]
    pub(super) fn end_of_stream(&self) {
        let ended = self.ended.fetch_add(1, Ordering::AcqRel) + 1;
        if ended == self.streams.len() && !self.is_closed() {
            let detail = "the peer closed it; look at that rank's output for the first error";
            self.fate.seal(self.error(detail.to_owned()));
        }
    }

    /// Ends it for its owner, whose memory is not touched any more when this returns. `finish`: what is under way in
    /// the kernel still arrives.
    fn close(self: &Arc<Link>) {
        self.closed.store(true, Ordering::Release);
        let mut whole = match &self.side {
            Side::Out(outgoing) => outgoing.clear(),
            Side::In(_) => false,
        };
        for stream in &self.streams {
            // A pump that holds one of these is in a call that does not wait; the next one finds the link closed.
            whole &= lock(&stream.output).clear();
            lock(&stream.input).clear();
        }
        self.requests.abandon();
        for (index, stream) in self.streams.iter().enumerate() {
            stream.shut(if whole { Shutdown::Write } else { Shutdown::Both });
            stream.worker.push(Task::Close { link: self.clone(), stream: index, linger: whole });
        }
    }
}

/// The sending end of a connection. Dropping it closes the connection; what was done before still arrives.
#[derive(Debug)]
pub struct Sender {
    pub(super) link: Arc<Link>,
}

impl Sender {
    /// Sends `len` bytes under a tag; the request is done when they are not needed any more. `None`: too many requests
    /// are open, ask again later.
    ///
    /// # Safety
    /// `data` is valid for reads of `len` bytes, and nobody writes to it, until the request is done or this is dropped.
    ///
    /// # Errors
    /// Why the connection failed.
    pub unsafe fn send(&self, data: *const u8, len: usize, tag: i32) -> Result<Option<&Request>> {
        self.link.fate.check()?;
        let Side::Out(outgoing) = &self.link.side else { return Ok(None) };
        // An empty message is open, too: until its frame is sent.
        let Some(slot) = self.link.requests.take(len.max(1), 1, len) else { return Ok(None) };
        outgoing.post(&self.link, slot, data, len, tag);
        Ok(self.link.requests.get(slot))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.link.close();
    }
}

/// The receiving end of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct Receiver {
    pub(super) link: Arc<Link>,
}

impl Receiver {
    /// Posts up to [`MAX_GROUP`] receives, each with its memory, its length and its tag; the request is done when all
    /// of them are. A message may be shorter than its memory. `None`: too many requests are open, ask again later.
    ///
    /// # Safety
    /// The memory is valid for writes, and nobody else uses it, until the request is done or this is dropped.
    ///
    /// # Errors
    /// Why the connection failed.
    pub unsafe fn receive(&self, group: &[(*mut u8, usize, i32)]) -> Result<Option<&Request>> {
        if group.is_empty() || group.len() > MAX_GROUP {
            return Err(Error::invalid(
                "receive",
                format!("expected 1 to {MAX_GROUP} in a group, got {}", group.len()),
            ));
        }
        let Side::In(incoming) = &self.link.side else { return Ok(None) };
        let Some(slot) = self.link.requests.take(group.len(), group.len(), 0) else { return Ok(None) };
        incoming.post(&self.link, slot, group);
        let request = self.link.requests.get(slot);
        if request.is_some_and(|r| !r.is_done()) {
            self.link.fate.check()?;
        }
        Ok(request)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.link.close();
    }
}

/// The two sides of a new link.
pub(super) fn sender(name: String, sockets: Vec<TcpStream>, config: &Config, workers: &Workers) -> Result<Sender> {
    let side = Side::Out(Outgoing::new(config));
    Ok(Sender { link: Link::new(name, sockets, side, workers)? })
}

/// As [`sender`].
pub(super) fn receiver(name: String, sockets: Vec<TcpStream>, config: &Config, workers: &Workers) -> Result<Receiver> {
    let side = Side::In(Incoming::new(config));
    Ok(Receiver { link: Link::new(name, sockets, side, workers)? })
}
