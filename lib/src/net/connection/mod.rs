//! A connection: its streams, what is posted on it, and how it ends.

mod closing;
pub(super) mod ends;
mod service;

use std::net::{Shutdown, TcpStream};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::net::data::control::Outbox;
use crate::net::data::frame::Frame;
use crate::net::data::rate;
use crate::net::data::receiver::ReceiveQueue;
use crate::net::data::request::{Requests, Status};
use crate::net::data::sender::SendQueue;
use crate::net::data::stream::{State, Stream};
use crate::net::data::writer::Writer;
use crate::net::rdma::{Devices, Queues};
use crate::net::worker::pool::Workers;
use crate::net::worker::thread::{Job, Worker};
use crate::threads::lock;

/// Additional stream positions, for streams that replace lost ones. A position is free again once both ends have
/// retired the stream that was there.
const SPARE: usize = 16;

/// Messages of this length are worth waking threads that sleep.
const LONG: usize = 128 << 10;

/// Properties of the paths to the peer.
#[derive(Debug, Clone, Copy)]
pub(in crate::net) struct Paths {
    /// True if there is more than one: fragments are acknowledged, and those of a lost stream go over others.
    pub(in crate::net) several: bool,
    /// True if the paths lead through other nodes, which the connection's name lists.
    pub(in crate::net) relayed: bool,
}

/// Sending or receiving end of a connection.
#[derive(Debug)]
pub(in crate::net) enum Side {
    Out(SendQueue),
    In(ReceiveQueue),
}

impl Side {
    pub(in crate::net) fn receives(&self) -> bool {
        matches!(self, Side::In(_))
    }
}

/// A connection, shared by its owner and the threads that serve its streams.
#[derive(Debug)]
pub(in crate::net) struct Connection {
    origin: Origin,
    pub(in crate::net) name: String,
    /// Streams by position, which is the stream's number modulo the number of positions. A stream that replaces a lost
    /// one has its own, new number.
    streams: Box<[OnceLock<Stream>]>,
    pub(in crate::net) side: Side,
    pub(in crate::net) requests: Requests,
    pub(in crate::net) paths: Paths,
    closed: AtomicBool,
    /// The stream that is woken next.
    next: AtomicUsize,
    /// Control frames about streams for the peer; any other stream may carry them.
    outbox: Outbox,
    pub(in crate::net) rdma: Queues,
    /// Held while a stream is failed over, so that two that are lost at once do not take each other for the last one.
    pub(in crate::net) losing: Mutex<()>,
    /// Numbers of streams that this end has not seen, and for which it has replied that nothing came over them. Held
    /// while a stream is added.
    pub(in crate::net) refused: Mutex<Vec<usize>>,
}

impl Connection {
    pub(in crate::net) fn new(
        name: String,
        sockets: Vec<TcpStream>,
        paths: Paths,
        side: Side,
        (workers, devices): (&Workers, Option<Arc<Devices>>),
    ) -> Result<Arc<Connection>> {
        let count = sockets.len();
        let receives = side.receives();
        let mut streams: Vec<Stream> = Vec::new();
        for (index, socket) in sockets.into_iter().enumerate() {
            let bulk = !paths.several && workers.is_bulk(index, count);
            let worker = (workers.next(receives, bulk), bulk);
            streams.push(Stream::new(index, socket, State::Alive, worker, streams.iter()));
        }
        let spare = std::iter::repeat_with(OnceLock::new).take(if paths.several { SPARE } else { 0 });
        let connection = Arc::new(Connection {
            origin: Origin::here(),
            name,
            streams: streams.into_iter().map(OnceLock::from).chain(spare).collect(),
            side,
            requests: Requests::new(workers.activity()),
            paths,
            closed: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            outbox: Outbox::default(),
            rdma: Queues::new(devices),
            losing: Mutex::default(),
            refused: Mutex::default(),
        });
        (0..count).for_each(|index| connection.serve(index));
        connection.rdma.offer_where(&connection, |_| true);
        Ok(connection)
    }

    /// Adds a stream in the position of a lost one, under the number that the sender gave it; false if that position is
    /// not free, or the connection is closed or has failed.
    pub(in crate::net) fn add(self: &Arc<Connection>, index: usize, socket: TcpStream, workers: &Workers) -> bool {
        {
            let refused = lock(&self.refused);
            if !self.is_free(index) || refused.contains(&index) {
                return false;
            }
            if let Err(why) = self.put(index, socket, workers) {
                log::debug!("net: {}: stream {index}: {why}", self.name);
                return false;
            }
        }
        self.serve(index);
        // Control frames about other lost streams that no stream could carry.
        self.resend_control();
        if let Side::Out(sender) = &self.side {
            sender.wake(self);
        }
        true
    }

    fn put(self: &Arc<Connection>, index: usize, socket: TcpStream, workers: &Workers) -> std::io::Result<()> {
        let state = if let Side::Out(_) = self.side { State::Alive } else { State::New };
        // The peer knows nothing of the stream before it receives this.
        let first = |stream: &Stream| match self.side {
            Side::Out(_) => Writer::joining(index, self.rdma.offer(self, index, stream)),
            Side::In(_) => Writer::default(),
        };
        let Some(position) = self.streams.get(self.position(index)) else { return Ok(()) };
        if let Some(stream) = position.get() {
            return stream.renew(index, &socket, state, first(stream));
        }
        let others = self.alive().map(|(_, stream)| stream);
        let stream = Stream::new(index, socket, state, (workers.next(self.side.receives(), false), false), others);
        *lock(&stream.writer) = first(&stream);
        position.set(stream).map_err(|_| std::io::Error::other("its position is taken"))
    }

    /// Number of stream positions.
    pub(in crate::net) fn positions(&self) -> usize {
        self.streams.len()
    }

    #[inline]
    fn position(&self, index: usize) -> usize {
        if index < self.streams.len() { index } else { index % self.streams.len().max(1) }
    }

    /// Fails in a forked child.
    #[inline]
    pub(in crate::net) fn check_here(&self, op: &str) -> Result<()> {
        if self.origin.is_here() { Ok(()) } else { Err(crate::net::elsewhere(op)) }
    }

    /// Returns true if several paths lead to the peer.
    #[inline]
    pub(in crate::net) fn several(&self) -> bool {
        self.paths.several
    }

    /// Returns true if the paths to the peer lead through other nodes.
    pub(in crate::net) fn relayed(&self) -> bool {
        self.paths.relayed
    }

    /// Advice for the reader of an error about a closed stream: the output to look at.
    pub(in crate::net) fn elsewhere(&self) -> &'static str {
        if self.relayed() {
            "look at the output of that rank and of the relays for the first error"
        } else {
            "look at that rank's output for the first error"
        }
    }

    pub(in crate::net) fn name(&self) -> &str {
        &self.name
    }

    /// The connection's failure state, and the alarm that wakes its owner.
    pub(in crate::net) fn status(&self) -> &Status {
        self.requests.status()
    }

    /// The stream of this number, unless another one has its position by now.
    #[inline]
    pub(in crate::net) fn stream(&self, index: usize) -> Option<&Stream> {
        self.beside(index).filter(|stream| stream.number() == index)
    }

    /// The stream that has the position of this number now, whatever its own number.
    #[inline]
    pub(in crate::net) fn beside(&self, index: usize) -> Option<&Stream> {
        self.streams.get(self.position(index))?.get()
    }

    /// The latest streams of all positions, with their numbers.
    pub(in crate::net) fn streams(&self) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.streams.iter().filter_map(|position| position.get().map(|stream| (stream.number(), stream)))
    }

    /// Live streams that are not suspected; all live streams where all are suspected.
    #[inline]
    fn working(&self) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        let any = self.several() && self.alive().any(|(_, stream)| stream.is_suspect()) && self.has_working();
        self.alive().filter(move |(_, stream)| !any || !stream.is_suspect())
    }

    fn has_working(&self) -> bool {
        self.alive().any(|(_, stream)| !stream.is_suspect())
    }

    /// Returns true if `stream` is suspected while another live stream is not: others should carry its data.
    #[inline]
    pub(in crate::net) fn avoids(&self, stream: &Stream) -> bool {
        stream.is_suspect() && self.has_working()
    }

    /// Streams in the state [`State::Alive`], with their numbers.
    pub(in crate::net) fn alive(&self) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.streams().filter(|(_, stream)| stream.is(State::Alive))
    }

    /// Returns true if a stream of this number may be added: both ends have retired the one before it, or the sender
    /// has never had that.
    pub(in crate::net) fn is_free(&self, index: usize) -> bool {
        let is_past = |of: &Stream| of.number() < index && (of.is(State::Retired) || of.is(State::New));
        !self.is_over() && self.several() && self.beside(index).is_none_or(is_past)
    }

    #[inline]
    pub(in crate::net) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns true once the connection is closed or has failed.
    pub(in crate::net) fn is_over(&self) -> bool {
        self.is_closed() || self.status().check().is_err()
    }

    /// Has the thread of stream `index` look for something to send.
    pub(in crate::net) fn wake(self: &Arc<Connection>, index: usize) {
        if let Some(stream) = self.stream(index)
            && !stream.queued.swap(true, Ordering::AcqRel)
        {
            stream.worker.push(Job::Write(stream.key));
        }
    }

    /// Has the threads of all live streams on the NIC pair of stream `index` look for something to send.
    pub(in crate::net) fn wake_beside(self: &Arc<Connection>, index: usize) {
        let rail = self.stream(index).and_then(|stream| stream.rail);
        self.alive().filter(|(_, stream)| stream.rail == rail).for_each(|(index, _)| self.wake(index));
    }

    /// Has a stream's thread read from it again: there may be a posted buffer for the fragment that it holds.
    pub(in crate::net) fn resume(self: &Arc<Connection>, index: usize) {
        if let Some(stream) = self.stream(index) {
            stream.worker.push(Job::Read(stream.key));
        }
    }

    /// Drives the threads' progress inline, on the thread of the owner, which waits for it.
    pub(in crate::net) fn drive_progress(&self) {
        // Mostly one.
        let mut last: Option<&Arc<Worker>> = None;
        for (_, stream) in self.streams() {
            if !last.is_some_and(|last| Arc::ptr_eq(last, &stream.worker)) {
                stream.worker.drive_progress();
            }
            last = Some(&stream.worker);
        }
    }

    /// Readable when [`Connection::drive_progress`] has something to do.
    pub(in crate::net) fn fd(&self) -> Option<RawFd> {
        self.streams().next().map(|(_, stream)| stream.worker.fd())
    }

    /// Streams that take a message of `len` bytes: all working ones, but those of bulk threads only if it is long.
    pub(in crate::net) fn eligible(&self, len: usize) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.working().filter(move |(_, stream)| !stream.bulk || len >= LONG)
    }

    /// Wakes up to `some` streams that take a message of `len` bytes, as [`Connection::wake`] does; other ones each
    /// time.
    pub(in crate::net) fn wake_some(self: &Arc<Connection>, some: usize, len: usize) {
        let all = self.eligible(len).count();
        let some = some.min(all);
        let first = self.next.fetch_add(some, Ordering::Relaxed) % all.max(1);
        self.eligible(len).cycle().skip(first).take(some).for_each(|(index, _)| self.wake(index));
    }

    /// Returns `Ok` if a fragment of `bytes` bytes would arrive over stream `index` as early as over any other, else
    /// `Err` with the number of the stream that should take it.
    pub(in crate::net) fn first_to_arrive(&self, index: usize, bytes: usize) -> Result<(), usize> {
        rate::first_to_arrive(index, bytes, self.working().map(|(index, stream)| (index, &*stream.load)))
    }

    /// Returns true if the measured rates of the connection's NIC pairs differ much ([`rate::differ`]).
    pub(in crate::net) fn is_uneven(&self) -> bool {
        self.several() && rate::differ(self.alive().map(|(_, stream)| &*stream.load))
    }

    /// Fails everything on this connection, for the reason `detail`.
    #[cold]
    pub(in crate::net) fn fail(&self, detail: String) {
        if self.is_closed() {
            return;
        }
        if self.status().fail(self.error(detail)) {
            self.streams().for_each(|(_, stream)| stream.shut(Shutdown::Both));
        }
    }

    pub(in crate::net) fn error(&self, detail: String) -> Error {
        let op = match self.side {
            Side::Out(_) => "send",
            Side::In(_) => "receive",
        };
        Error::Connection { op: op.to_owned(), connection: self.name.clone(), detail }
    }

    /// Sends control frames to the peer, over whichever stream is free first.
    pub(in crate::net) fn send_control(self: &Arc<Connection>, frames: Vec<Frame>) {
        self.outbox.put(frames);
        self.wake_some(usize::MAX, usize::MAX);
    }

    /// Takes the next control frame for the peer, if there is one.
    pub(in crate::net) fn next_control(&self) -> Option<Frame> {
        self.outbox.take()
    }

    /// Acknowledges what the owner has received: a message is complete here before its acknowledgement is written, and
    /// the sender waits for that.
    fn acknowledge(self: &Arc<Connection>) {
        if !self.several() || !self.side.receives() {
            return;
        }
        for (index, stream) in self.alive() {
            // Until the thread that reads from it has counted what it read.
            drop(lock(&stream.reader));
            lock(&stream.writer).pump(self, index, usize::MAX);
        }
    }

    /// Ends it for its owner, whose memory is not touched any more when this returns. Where nothing was left to write,
    /// what is under way in the kernel still arrives.
    pub(in crate::net) fn close(self: &Arc<Connection>) {
        if !self.origin.is_here() {
            // The connection, and the threads that serve it, are its parent's.
            return std::mem::forget(self.clone());
        }
        self.acknowledge();
        self.closed.store(true, Ordering::Release);
        let mut whole = match &self.side {
            Side::Out(sender) => sender.clear(),
            Side::In(_) => false,
        };
        for (_, stream) in self.streams() {
            // A pump that holds one of these is in a call that does not wait; the next one finds the connection closed.
            whole &= lock(&stream.writer).clear();
            lock(&stream.reader).clear();
        }
        self.rdma.close();
        self.requests.abandon();
        for (_, stream) in self.streams() {
            stream.shut(if whole { Shutdown::Write } else { Shutdown::Both });
            stream.worker.push(if whole { Job::Linger(stream.key) } else { Job::Remove(stream.key) });
        }
    }
}
