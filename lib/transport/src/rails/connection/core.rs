//! Streams of a connection, and what is posted on it: all that its data path works on.

use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::rails::data::frame::Frame;
use crate::rails::data::reader::Reader;
use crate::rails::data::session::{Paths, Session};
use crate::rails::data::side::Side;
use crate::rails::data::writer::Writer;
use crate::rails::failover::agreement::Agreement;
use crate::rails::failover::slot::{Slot, State};
use crate::rails::stream::{Stream, rate};
use crate::rails::worker::activity::Activity;
use crate::rails::worker::thread::{Job, Worker};
use crate::seal::Socket;
use tinynccl_sys::threads::lock;

/// Messages of this length are worth waking threads that sleep.
const LONG: usize = 128 << 10;

impl Agreement for Core {
    fn receives(&self) -> bool {
        self.side.receives()
    }

    fn several(&self) -> bool {
        self.session.several()
    }

    fn positions(&self) -> usize {
        self.streams.len()
    }

    fn at(&self, position: usize) -> Option<&Slot> {
        self.streams.get(position)?.get().map(|stream| &***stream)
    }
}

/// A stream with what reads from it and writes to it.
#[derive(Debug)]
pub(in crate::rails) struct DataStream {
    stream: Stream,
    pub(in crate::rails) reader: Mutex<Reader>,
    pub(in crate::rails) writer: Mutex<Writer>,
}

impl DataStream {
    /// `first`: what is written first.
    pub(in crate::rails) fn new(stream: Stream, first: Writer) -> DataStream {
        DataStream { stream, reader: Mutex::default(), writer: Mutex::new(first) }
    }

    /// Begins again under a new number ([`Stream::renew`]), with `first` to write.
    pub(in crate::rails) fn renew(
        &self,
        number: usize,
        socket: Socket,
        state: State,
        first: Writer,
    ) -> std::io::Result<()> {
        self.check_rail(&socket)?;
        let (mut reader, mut writer) = (lock(&self.reader), lock(&self.writer));
        self.stream.renew(number, socket, state)?;
        (*reader, *writer) = (Reader::default(), first);
        Ok(())
    }
}

impl Deref for DataStream {
    type Target = Stream;

    #[inline]
    fn deref(&self) -> &Stream {
        &self.stream
    }
}

/// Streams of a connection, and what is posted on it.
#[derive(Debug)]
pub(in crate::rails) struct Core {
    pub(in crate::rails) session: Session,
    /// Streams by position, which is the stream's number modulo the number of positions. A stream that replaces a lost
    /// one has its own, new number.
    streams: Box<[OnceLock<DataStream>]>,
    pub(in crate::rails) side: Side,
    /// The stream that is woken next.
    next: AtomicUsize,
}

impl Deref for Core {
    type Target = Session;

    #[inline]
    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Core {
    /// `spare`: positions without a stream.
    pub(in crate::rails) fn new(
        name: String,
        (streams, spare): (Vec<Stream>, usize),
        paths: Paths,
        side: Side,
        activity: &Arc<Activity>,
    ) -> Core {
        let streams = streams.into_iter().map(|stream| OnceLock::from(DataStream::new(stream, Writer::default())));
        let spare = std::iter::repeat_with(OnceLock::new).take(spare);
        Core {
            session: Session::new(name, side.receives(), paths, activity),
            streams: streams.chain(spare).collect(),
            side,
            next: AtomicUsize::new(0),
        }
    }

    /// Number of stream positions.
    pub(in crate::rails) fn positions(&self) -> usize {
        self.streams.len()
    }

    /// Returns true if a stream of this number may be added ([`Agreement::admits`]).
    pub(in crate::rails) fn is_free(&self, index: usize) -> bool {
        !self.is_over() && self.admits(&[], index)
    }

    /// The position of this number, which has a stream or will have one.
    #[inline]
    pub(in crate::rails) fn position(&self, index: usize) -> Option<&OnceLock<DataStream>> {
        let position = if index < self.streams.len() { index } else { index % self.streams.len().max(1) };
        self.streams.get(position)
    }

    /// The stream of this number, unless another one has its position by now.
    #[inline]
    pub(in crate::rails) fn stream(&self, index: usize) -> Option<&DataStream> {
        self.beside(index).filter(|stream| stream.number() == index)
    }

    /// The stream that has the position of this number now, whatever its own number.
    #[inline]
    pub(in crate::rails) fn beside(&self, index: usize) -> Option<&DataStream> {
        self.position(index)?.get()
    }

    /// The latest streams of all positions, with their numbers.
    pub(in crate::rails) fn streams(&self) -> impl Iterator<Item = (usize, &DataStream)> + Clone {
        self.streams.iter().filter_map(|position| position.get().map(|stream| (stream.number(), stream)))
    }

    /// Live streams that are not suspected; all live streams where all are suspected.
    #[inline]
    fn working(&self) -> impl Iterator<Item = (usize, &DataStream)> + Clone {
        let any = self.several() && self.alive().any(|(_, stream)| stream.is_suspect()) && self.has_working();
        self.alive().filter(move |(_, stream)| !any || !stream.is_suspect())
    }

    fn has_working(&self) -> bool {
        self.alive().any(|(_, stream)| !stream.is_suspect())
    }

    /// Streams in the state [`State::Alive`], with their numbers.
    pub(in crate::rails) fn alive(&self) -> impl Iterator<Item = (usize, &DataStream)> + Clone {
        self.streams().filter(|(_, stream)| stream.is(State::Alive))
    }

    /// Has the thread of stream `index` look for something to send.
    pub(in crate::rails) fn wake(&self, index: usize) {
        if let Some(stream) = self.stream(index)
            && !stream.queued.swap(true, Ordering::AcqRel)
        {
            stream.worker.push(Job::Write(stream.key));
        }
    }

    /// Has the threads of all live streams on the NIC pair of stream `index` look for something to send.
    pub(in crate::rails) fn wake_beside(&self, index: usize) {
        let rail = self.stream(index).and_then(|stream| stream.rail);
        self.alive().filter(|(_, stream)| stream.rail == rail).for_each(|(index, _)| self.wake(index));
    }

    /// Has a stream's thread read from it again: there may be a posted buffer for the fragment that it holds.
    pub(in crate::rails) fn resume(&self, index: usize) {
        if let Some(stream) = self.stream(index) {
            stream.worker.push(Job::Read(stream.key));
        }
    }

    /// Drives the threads' progress inline, on the thread of the owner, which waits for it.
    pub(in crate::rails) fn drive_progress(&self) {
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
    pub(in crate::rails) fn fd(&self) -> Option<RawFd> {
        self.streams().next().map(|(_, stream)| stream.worker.fd())
    }

    /// Streams that take a message of `len` bytes: all working ones, but those of bulk threads only if it is long.
    pub(in crate::rails) fn eligible(&self, len: usize) -> impl Iterator<Item = (usize, &DataStream)> + Clone {
        self.working().filter(move |(_, stream)| !stream.bulk || len >= LONG)
    }

    /// Wakes up to `some` streams that take a message of `len` bytes, as [`Core::wake`] does; other ones each
    /// time.
    pub(in crate::rails) fn wake_some(&self, some: usize, len: usize) {
        let all = self.eligible(len).count();
        let some = some.min(all);
        let first = self.next.fetch_add(some, Ordering::Relaxed) % all.max(1);
        self.eligible(len).cycle().skip(first).take(some).for_each(|(index, _)| self.wake(index));
    }

    /// Returns `Ok` if a fragment of `bytes` bytes would arrive over stream `index` as early as over any other, else
    /// `Err` with the number of the stream that should take it.
    pub(in crate::rails) fn first_to_arrive(&self, index: usize, bytes: usize) -> Result<(), usize> {
        rate::first_to_arrive(index, bytes, self.working().map(|(index, stream)| (index, &*stream.load)))
    }

    /// Returns true if the measured rates of the connection's NIC pairs differ much ([`rate::differ`]).
    pub(in crate::rails) fn is_uneven(&self) -> bool {
        self.several() && rate::differ(self.alive().map(|(_, stream)| &*stream.load))
    }

    /// Fails everything on this connection, for the reason `detail`.
    #[cold]
    pub(in crate::rails) fn fail(&self, detail: String) {
        if self.is_closed() {
            return;
        }
        if self.status().fail(self.error(detail)) {
            self.streams().for_each(|(_, stream)| stream.shut(Shutdown::Both));
        }
    }

    /// Sends control frames to the peer, over whichever stream is free first.
    pub(in crate::rails) fn send_control(&self, frames: Vec<Frame>) {
        self.outbox.put(frames);
        self.wake_some(usize::MAX, usize::MAX);
    }
}
