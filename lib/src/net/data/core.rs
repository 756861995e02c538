//! Streams of a connection, and what is posted on it: all that its data path works on.

use std::net::Shutdown;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::Error;
use crate::net::data::control::Outbox;
use crate::net::data::frame::Frame;
use crate::net::data::rate;
use crate::net::data::receiver::ReceiveQueue;
use crate::net::data::request::{Requests, Status};
use crate::net::data::sender::SendQueue;
use crate::net::data::stream::{State, Stream};
use crate::net::worker::activity::Activity;
use crate::net::worker::thread::{Job, Worker};

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

/// Streams of a connection, and what is posted on it.
#[derive(Debug)]
pub(in crate::net) struct Core {
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
}

impl Core {
    /// `spare`: positions without a stream.
    pub(in crate::net) fn new(
        name: String,
        (streams, spare): (Vec<Stream>, usize),
        paths: Paths,
        side: Side,
        activity: &Arc<Activity>,
    ) -> Core {
        let spare = std::iter::repeat_with(OnceLock::new).take(spare);
        Core {
            name,
            streams: streams.into_iter().map(OnceLock::from).chain(spare).collect(),
            side,
            requests: Requests::new(activity),
            paths,
            closed: AtomicBool::new(false),
            next: AtomicUsize::new(0),
            outbox: Outbox::default(),
        }
    }

    /// Marks the connection as closed: no thread reads or writes for it any more.
    pub(in crate::net) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Number of stream positions.
    pub(in crate::net) fn positions(&self) -> usize {
        self.streams.len()
    }

    /// The position of this number, which has a stream or will have one.
    #[inline]
    pub(in crate::net) fn position(&self, index: usize) -> Option<&OnceLock<Stream>> {
        let position = if index < self.streams.len() { index } else { index % self.streams.len().max(1) };
        self.streams.get(position)
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
        self.position(index)?.get()
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
    pub(in crate::net) fn wake(&self, index: usize) {
        if let Some(stream) = self.stream(index)
            && !stream.queued.swap(true, Ordering::AcqRel)
        {
            stream.worker.push(Job::Write(stream.key));
        }
    }

    /// Has the threads of all live streams on the NIC pair of stream `index` look for something to send.
    pub(in crate::net) fn wake_beside(&self, index: usize) {
        let rail = self.stream(index).and_then(|stream| stream.rail);
        self.alive().filter(|(_, stream)| stream.rail == rail).for_each(|(index, _)| self.wake(index));
    }

    /// Has a stream's thread read from it again: there may be a posted buffer for the fragment that it holds.
    pub(in crate::net) fn resume(&self, index: usize) {
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

    /// Readable when [`Core::drive_progress`] has something to do.
    pub(in crate::net) fn fd(&self) -> Option<RawFd> {
        self.streams().next().map(|(_, stream)| stream.worker.fd())
    }

    /// Streams that take a message of `len` bytes: all working ones, but those of bulk threads only if it is long.
    pub(in crate::net) fn eligible(&self, len: usize) -> impl Iterator<Item = (usize, &Stream)> + Clone {
        self.working().filter(move |(_, stream)| !stream.bulk || len >= LONG)
    }

    /// Wakes up to `some` streams that take a message of `len` bytes, as [`Core::wake`] does; other ones each
    /// time.
    pub(in crate::net) fn wake_some(&self, some: usize, len: usize) {
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
    pub(in crate::net) fn send_control(&self, frames: Vec<Frame>) {
        self.outbox.put(frames);
        self.wake_some(usize::MAX, usize::MAX);
    }

    /// Takes the next control frame for the peer, if there is one.
    pub(in crate::net) fn next_control(&self) -> Option<Frame> {
        self.outbox.take()
    }
}
