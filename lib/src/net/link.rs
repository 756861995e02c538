//! A connection: its streams, what is posted on it, and how it ends.

use std::net::{Shutdown, TcpStream};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::frame::Frame;
use super::incoming::Incoming;
use super::load;
use super::outbox::Outbox;
use super::outgoing::Outgoing;
use super::output::Output;
use super::rdma::{Devices, Queues};
use super::request::{Fate, Requests};
use super::stream::{State, Stream};
use super::worker::{Task, Worker};
use super::workers::Workers;
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::threads::lock;

/// Additional stream positions, for streams that replace lost ones. A position is free again once both ends have left
/// the stream that was there.
const SPARE: usize = 16;

/// Messages of this length are worth waking threads that sleep.
const LONG: usize = 128 << 10;

/// Work that is left after a pump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// Nothing to do before the next event or the next job.
    Nothing,
    /// More, after other streams had their time slice.
    More,
    /// A fragment whose receive is not posted: it goes to memory of ours at this time, if the receive has not come
    /// before.
    Held(Instant),
}

/// Properties of the paths to the peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    /// True if there is more than one: fragments are acknowledged, and those of a lost stream go over others.
    pub(super) several: bool,
    /// True if the paths lead through other nodes, which the link's name names.
    pub(super) relayed: bool,
}

/// Sending or receiving end of a connection.
#[derive(Debug)]
pub(super) enum Side {
    Out(Outgoing),
    In(Incoming),
}

impl Side {
    pub(super) fn receives(&self) -> bool {
        matches!(self, Side::In(_))
    }
}

/// A connection, shared by its owner and the threads that serve its streams.
#[derive(Debug)]
pub(super) struct Link {
    origin: Origin,
    pub(super) name: String,
    /// Streams by position, which is the stream's number modulo the number of positions. A stream that replaces a lost
    /// one has its own, new number.
    streams: Box<[OnceLock<Stream>]>,
    pub(super) side: Side,
    pub(super) requests: Requests,
    pub(super) ways: Ways,
    closed: AtomicBool,
    /// The stream that is woken next.
    next: AtomicUsize,
    /// Control frames about streams for the peer; any other stream may carry them.
    words: Outbox,
    pub(super) rdma: Queues,
    /// Held while a stream is given up, so that two that are lost at once do not take each other for the one that is
    /// left.
    pub(super) losing: Mutex<()>,
    /// Numbers of streams that this end has not seen, and for which it has replied that nothing came over them. Held
    /// while a stream is added.
    pub(super) refused: Mutex<Vec<usize>>,
}

impl Link {
    pub(super) fn new(
        name: String,
        sockets: Vec<TcpStream>,
        ways: Ways,
        side: Side,
        (workers, devices): (&Workers, Option<Arc<Devices>>),
    ) -> Result<Arc<Link>> {
        let count = sockets.len();
        let receives = side.receives();
        let mut streams: Vec<Stream> = Vec::new();
        for (index, socket) in sockets.into_iter().enumerate() {
            let reserve = !ways.several && workers.is_reserve(index, count);
            let worker = (workers.next(receives, reserve), reserve);
            streams.push(Stream::new(index, socket, State::Alive, worker, streams.iter()));
        }
        let spare = std::iter::repeat_with(OnceLock::new).take(if ways.several { SPARE } else { 0 });
        let link = Arc::new(Link {
            origin: Origin::here(),
            name,
            streams: streams.into_iter().map(OnceLock::from).chain(spare).collect(),
            side,
            requests: Requests::new(workers.activity()),
            ways,
            closed: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            words: Outbox::default(),
            rdma: Queues::new(devices),
            losing: Mutex::default(),
            refused: Mutex::default(),
        });
        (0..count).for_each(|index| link.serve(index));
        link.rdma.offer_on(&link, |_| true);
        Ok(link)
    }

    /// Adds a stream in the position of a lost one, under the number that the sender gave it; false if that position is
    /// not free, or the link is closed or has failed.
    pub(super) fn add(self: &Arc<Link>, index: usize, socket: TcpStream, workers: &Workers) -> bool {
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
        self.restate();
        if let Side::Out(outgoing) = &self.side {
            outgoing.wake(self);
        }
        true
    }

    fn put(self: &Arc<Link>, index: usize, socket: TcpStream, workers: &Workers) -> std::io::Result<()> {
        let state = if let Side::Out(_) = self.side { State::Alive } else { State::New };
        // The peer knows nothing of the stream before it receives this.
        let first = |stream: &Stream| match self.side {
            Side::Out(_) => Output::joining(index, self.rdma.offer(self, index, stream)),
            Side::In(_) => Output::default(),
        };
        let Some(place) = self.streams.get(self.place(index)) else { return Ok(()) };
        if let Some(stream) = place.get() {
            return stream.renew(index, &socket, state, first(stream));
        }
        let others = self.alive().map(|(_, stream)| stream);
        let stream = Stream::new(index, socket, state, (workers.next(self.side.receives(), false), false), others);
        *lock(&stream.output) = first(&stream);
        place.set(stream).map_err(|_| std::io::Error::other("its place is taken"))
    }

    /// Number of stream positions.
    pub(super) fn places(&self) -> usize {
        self.streams.len()
    }

    #[inline]
    fn place(&self, index: usize) -> usize {
        if index < self.streams.len() { index } else { index % self.streams.len().max(1) }
    }

    fn serve(self: &Arc<Link>, index: usize) {
        if let Some(stream) = self.stream(index) {
            stream.worker.push(Task::Add(self.clone(), index));
        }
    }

    /// Fails in a forked child.
    #[inline]
    pub(super) fn check_here(&self, op: &str) -> Result<()> {
        if self.origin.is_here() { Ok(()) } else { Err(super::elsewhere(op)) }
    }

    /// Returns true if several paths lead to the peer.
    #[inline]
    pub(super) fn several(&self) -> bool {
        self.ways.several
    }

    /// Returns true if the paths to the peer lead through other nodes.
    pub(super) fn relayed(&self) -> bool {
        self.ways.relayed
    }

    /// Advice for the reader of an error about a closed stream: the output to look at.
    pub(super) fn elsewhere(&self) -> &'static str {
        if self.relayed() {
            "look at the output of that rank and of the relays for the first error"
        } else {
            "look at that rank's output for the first error"
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The connection's failure state, and the alarm that wakes its owner.
    pub(super) fn fate(&self) -> &Fate {
        self.requests.fate()
    }

    /// The stream of this number, unless another one has its position by now.
    #[inline]
    pub(super) fn stream(&self, index: usize) -> Option<&Stream> {
        self.beside(index).filter(|stream| stream.number() == index)
    }

    /// The stream that has the position of this number now, whatever its own number.
    #[inline]
    pub(super) fn beside(&self, index: usize) -> Option<&Stream> {
        self.streams.get(self.place(index))?.get()
    }

    /// The latest streams of all positions, with their numbers.
    pub(super) fn streams(&self) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.streams.iter().filter_map(|place| place.get().map(|stream| (stream.number(), stream)))
    }

    /// Live streams that are not doubted; all live streams where all are doubted.
    #[inline]
    fn working(&self) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        let any = self.several() && self.alive().any(|(_, stream)| stream.is_doubted()) && self.has_working();
        self.alive().filter(move |(_, stream)| !any || !stream.is_doubted())
    }

    fn has_working(&self) -> bool {
        self.alive().any(|(_, stream)| !stream.is_doubted())
    }

    /// Returns true if `stream` is doubted while another live stream is not: others should carry its data.
    #[inline]
    pub(super) fn spares(&self, stream: &Stream) -> bool {
        stream.is_doubted() && self.has_working()
    }

    /// Streams in the state [`State::Alive`], with their numbers.
    pub(super) fn alive(&self) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.streams().filter(|(_, stream)| stream.is(State::Alive))
    }

    /// Returns true if a stream of this number may be added: both ends have left the one before it, or the sender has
    /// never had that.
    pub(super) fn is_free(&self, index: usize) -> bool {
        let left = |of: &Stream| of.number() < index && (of.is(State::Gone) || of.is(State::New));
        !self.is_over() && self.several() && self.beside(index).is_none_or(left)
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns true once the connection is closed or has failed.
    pub(super) fn is_over(&self) -> bool {
        self.is_closed() || self.fate().check().is_err()
    }

    /// Has the thread of stream `index` look for something to send.
    pub(super) fn wake(self: &Arc<Link>, index: usize) {
        if let Some(stream) = self.stream(index)
            && !stream.queued.swap(true, Ordering::AcqRel)
        {
            stream.worker.push(Task::Work(self.clone(), index));
        }
    }

    /// Has the threads of all live streams on the NIC pair of stream `index` look for something to send.
    pub(super) fn wake_beside(self: &Arc<Link>, index: usize) {
        let rail = self.stream(index).and_then(|stream| stream.rail);
        self.alive().filter(|(_, stream)| stream.rail == rail).for_each(|(index, _)| self.wake(index));
    }

    /// Has a stream's thread read from it again: there may be a posted buffer for the fragment that it holds.
    pub(super) fn resume(self: &Arc<Link>, index: usize) {
        if let Some(stream) = self.stream(index) {
            stream.worker.push(Task::Read(self.clone(), index));
        }
    }

    /// Drives the threads' progress inline, on the thread of the owner, which waits for it.
    pub(super) fn attend(&self) {
        // Mostly one.
        let mut last: Option<&Arc<Worker>> = None;
        for (_, stream) in self.streams() {
            if !last.is_some_and(|last| Arc::ptr_eq(last, &stream.worker)) {
                stream.worker.attend();
            }
            last = Some(&stream.worker);
        }
    }

    /// Readable when [`Link::attend`] has something to do.
    pub(super) fn fd(&self) -> Option<RawFd> {
        self.streams().next().map(|(_, stream)| stream.worker.fd())
    }

    /// Streams that take a message of `len` bytes: all working ones, but those of bulk threads only if it is long.
    pub(super) fn takers(&self, len: usize) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.working().filter(move |(_, stream)| !stream.reserve || len >= LONG)
    }

    /// Wakes up to `some` streams that take a message of `len` bytes, as [`Link::wake`] does; other ones each time.
    pub(super) fn wake_some(self: &Arc<Link>, some: usize, len: usize) {
        let all = self.takers(len).count();
        let some = some.min(all);
        let first = self.next.fetch_add(some, Ordering::Relaxed) % all.max(1);
        self.takers(len).cycle().skip(first).take(some).for_each(|(index, _)| self.wake(index));
    }

    /// Returns `Ok` if a fragment of `bytes` bytes would arrive over stream `index` as early as over any other, else
    /// `Err` with the number of the stream that should take it.
    pub(super) fn turn(&self, index: usize, bytes: usize) -> Result<(), usize> {
        load::turn(index, bytes, self.working().map(|(index, stream)| (index, &*stream.load)))
    }

    /// Returns true if the measured rates of the link's NIC pairs differ much ([`load::differ`]).
    pub(super) fn is_uneven(&self) -> bool {
        self.several() && load::differ(self.alive().map(|(_, stream)| &*stream.load))
    }

    /// Fails everything on this link, for the reason `detail`.
    #[cold]
    pub(super) fn fail(&self, detail: String) {
        if self.is_closed() {
            return;
        }
        if self.fate().seal(self.error(detail)) {
            self.streams().for_each(|(_, stream)| stream.shut(Shutdown::Both));
        }
    }

    pub(super) fn error(&self, detail: String) -> Error {
        let op = match self.side {
            Side::Out(_) => "send",
            Side::In(_) => "receive",
        };
        Error::Connection { op: op.to_owned(), connection: self.name.clone(), detail }
    }

    /// Sends control frames to the peer, over whichever stream is free first.
    pub(super) fn say(self: &Arc<Link>, words: Vec<Frame>) {
        self.words.put(words);
        self.wake_some(usize::MAX, usize::MAX);
    }

    /// Takes the next control frame for the peer, if there is one.
    pub(super) fn word(&self) -> Option<Frame> {
        self.words.take()
    }

    /// Acknowledges what the owner has received: a message is complete here before its acknowledgement is written, and
    /// the sender waits for that.
    fn acknowledge(self: &Arc<Link>) {
        if !self.several() || !self.side.receives() {
            return;
        }
        for (index, stream) in self.alive() {
            // Until the thread that reads from it has counted what it read.
            drop(lock(&stream.input));
            lock(&stream.output).pump(self, index, usize::MAX);
        }
    }

    /// Ends it for its owner, whose memory is not touched any more when this returns. Where nothing was left to write,
    /// what is under way in the kernel still arrives.
    pub(super) fn close(self: &Arc<Link>) {
        if !self.origin.is_here() {
            // The connection, and the threads that serve it, are its parent's.
            return std::mem::forget(self.clone());
        }
        self.acknowledge();
        self.closed.store(true, Ordering::Release);
        let mut whole = match &self.side {
            Side::Out(outgoing) => outgoing.clear(),
            Side::In(_) => false,
        };
        for (_, stream) in self.streams() {
            // A pump that holds one of these is in a call that does not wait; the next one finds the link closed.
            whole &= lock(&stream.output).clear();
            lock(&stream.input).clear();
        }
        self.rdma.close(self);
        self.requests.abandon();
        for (index, stream) in self.streams() {
            stream.shut(if whole { Shutdown::Write } else { Shutdown::Both });
            stream.worker.push(Task::Close { link: self.clone(), stream: index, linger: whole });
        }
    }
}
