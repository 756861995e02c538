//! A thread that reads and writes sockets, so that NCCL's own never waits for one. Where a connection's owner waits for
//! it anyway, it drives this thread's progress inline: a handover to a thread and back takes longer than a short
//! message. On a host with few cores, where these threads sleep, so does a thread that tests a request for a short
//! message.

use std::collections::HashMap;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;

use crate::bootstrap::unacknowledged;
use crate::doorbell::Doorbell;
use crate::error::{Error, Result};
use crate::net::connection::{Connection, Remaining};
use crate::net::data::request::Activity;
use crate::net::rdma::Devices;
use crate::net::worker::contention::Contention;
use crate::threads::{Thread, lock, poll, try_lock};

/// Longest time that the socket of a closed connection waits for the peer to close, too.
const LINGER: Duration = Duration::from_secs(5);
/// Time between two checks of such sockets.
const SLICE: Duration = Duration::from_millis(200);
/// Time for which a thread leaves its work to an owner that did it a moment ago.
const INLINE_LEASE: Duration = Duration::from_millis(2);
/// The bell's key among events.
const BELL: u64 = 0;

/// Something to do for a worker thread.
#[derive(Debug)]
pub(in crate::net) enum Task {
    /// A new stream, which this thread serves from now on.
    Add(Arc<Connection>, usize),
    /// The stream may have something to send.
    Work(Arc<Connection>, usize),
    /// There may be a posted buffer for the fragment that the stream holds.
    Read(Arc<Connection>, usize),
    /// The sender has retired this stream, and others bring its fragments.
    Leave(Arc<Connection>, usize),
    /// A new queue pair, which this thread serves from now on.
    Watch(Arc<Connection>, usize),
    /// The queue pair is closed.
    Unwatch(Arc<Connection>, usize),
    /// The asynchronous events of RDMA devices, which this thread handles from now on.
    Hear(Arc<Devices>),
    /// The stream's owner has closed it; `linger`: what is in the kernel should still arrive.
    Close { connection: Arc<Connection>, stream: usize, linger: bool },
}

/// State shared with the worker thread.
#[derive(Debug)]
pub(in crate::net) struct Worker {
    bell: Arc<Doorbell>,
    /// Tasks for the thread; `None` once it has ended.
    inbox: Mutex<Option<Vec<Task>>>,
    any: AtomicBool,
    asleep: AtomicBool,
    stop: AtomicBool,
    /// Number of times that an owner has driven the thread's progress inline.
    turns: AtomicUsize,
    epoll: Arc<OwnedFd>,
    run: Mutex<Run>,
}

/// Times for which a thread spins, in search of something to do, before it sleeps.
#[derive(Debug, Clone, Copy)]
pub(in crate::net) struct Spins {
    pub(in crate::net) idle: Duration,
    /// Time to spin while requests are open.
    pub(in crate::net) busy: Duration,
}

impl Worker {
    /// Starts the thread of number `index`.
    pub(in crate::net) fn start(index: usize, spins: Spins, activity: &Arc<Activity>) -> Result<(Arc<Worker>, Thread)> {
        let bell = Doorbell::new()?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::errno("net", "making an epoll", e))?;
        let added = epoll::add(&epoll, &bell, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN);
        added.map_err(|e| Error::errno("net", "waiting for an eventfd", e))?;
        let epoll = Arc::new(epoll);
        let run = Run {
            epoll: epoll.clone(),
            activity: activity.clone(),
            spins,
            active: Instant::now(),
            contention: Contention::default(),
            streams: HashMap::new(),
            queues: HashMap::new(),
            devices: HashMap::new(),
            next_key: BELL,
            again: Vec::new(),
            held: Vec::new(),
            lingering: 0,
        };
        let worker = Arc::new(Worker {
            bell,
            inbox: Mutex::new(Some(Vec::new())),
            any: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            turns: AtomicUsize::new(0),
            epoll,
            run: Mutex::new(run),
        });
        let (name, what) = (format!("tinynccl-net{index}"), "a thread of the network".to_owned());
        let ours = worker.clone();
        let thread = Thread::start("net", name, what, move || ours.run())?;
        Ok((worker, thread))
    }

    /// Has the thread end once it has finished.
    pub(in crate::net) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(in crate::net) fn push(&self, task: Task) {
        match &mut *lock(&self.inbox) {
            Some(inbox) => inbox.push(task),
            None => return,
        }
        self.any.store(true, Ordering::Release);
        self.rouse();
    }

    fn rouse(&self) {
        // The sleeper announces itself, then looks: one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            self.bell.ring();
        }
    }
}

/// A stream that this thread serves.
struct Served {
    connection: Arc<Connection>,
    stream: usize,
    /// Time at which the stream goes at the latest, as its owner is gone; `None` while it has one.
    until: Option<Instant>,
}

impl Served {
    /// Returns true if the owner has closed it, and the peer's kernel does not have all of its bytes yet.
    fn has_unsent(&self) -> bool {
        let Some(of) = self.connection.stream(self.stream).filter(|_| self.until.is_some()) else { return false };
        unacknowledged(of) > 0
    }
}

/// Streams, queue pairs and devices that a thread serves. Owners of connections drive their progress inline while they
/// wait, and the thread when they do not.
struct Run {
    epoll: Arc<OwnedFd>,
    activity: Arc<Activity>,
    spins: Spins,
    /// Time at which there was something to do last.
    active: Instant,
    contention: Contention,
    streams: HashMap<u64, Served>,
    queues: HashMap<u64, (Arc<Connection>, usize)>,
    devices: HashMap<u64, (Arc<Devices>, usize)>,
    next_key: u64,
    /// Streams whose time slice was over before they were done.
    again: Vec<u64>,
    /// Streams that wait for a receive, each with the time at which it stops to wait.
    held: Vec<(u64, Instant)>,
    /// Streams whose owner is gone.
    lingering: usize,
}

/// Buffer for the events of one wait.
struct Events([MaybeUninit<epoll::Event>; 64]);

impl Events {
    fn new() -> Events {
        Events([const { MaybeUninit::uninit() }; 64])
    }

    /// Waits for events, for at most `time`.
    fn wait(&mut self, epoll: &OwnedFd, time: Duration) -> &[epoll::Event] {
        let most = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        match epoll::wait(epoll, &mut self.0, Some(&most)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => &[],
            Err(e) => {
                log::error!("net: epoll: {}", std::io::Error::from(e));
                &[]
            }
        }
    }
}

/// Without its connections, which name their workers.
impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("streams", &self.streams.len()).finish_non_exhaustive()
    }
}

impl Worker {
    fn run(&self) {
        let mut turns = 0;
        while !self.stop.load(Ordering::Acquire) {
            let now = self.turns.load(Ordering::Relaxed);
            if now == turns {
                lock(&self.run).round(self);
            } else {
                turns = now;
                // The bell rings at the end; so may a thread that saw this one asleep before.
                let _ = poll(&mut [PollFd::new(&*self.bell, PollFlags::IN)], INLINE_LEASE);
            }
        }
        let mut run = lock(&self.run);
        run.finish(self);
        // What is left names this worker.
        let left = lock(&self.inbox).take();
        drop(left);
        for served in run.streams.values() {
            served.connection.fail("its network was shut down before it was closed".to_owned());
        }
        run.streams.clear();
        run.queues.clear();
        run.devices.clear();
    }

    /// Drives the worker's progress inline, on the thread of an owner that waits for its connection, unless another
    /// thread does. The worker's own thread stays away from then on, until no owner has come for a while.
    pub(in crate::net) fn drive_progress(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        if let Some(mut run) = try_lock(&self.run) {
            run.tasks(self);
            run.turns();
            run.events(self, Events::new().wait(&self.epoll, Duration::ZERO));
            run.sweep();
        }
    }

    /// Has the worker's own thread do its work again, though an owner has done it a moment ago.
    pub(in crate::net) fn hand_back(&self) {
        self.bell.ring();
    }

    /// Readable when [`Worker::drive_progress`] has something to do.
    pub(in crate::net) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

impl Run {
    /// Runs one round of the worker thread.
    fn round(&mut self, worker: &Worker) {
        let mut busy = self.tasks(worker);
        busy |= self.turns();
        let patience = if self.activity.any() { self.spins.busy } else { self.spins.idle };
        let spinning = busy || self.active.elapsed() < patience;
        let time = match spinning {
            true if busy => Duration::ZERO,
            true => self.contention.sleep(),
            false => self.sleep_for(),
        };
        if !time.is_zero() {
            worker.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if worker.any.load(Ordering::Acquire) {
                worker.asleep.store(false, Ordering::Relaxed);
                return;
            }
        }
        let mut events = Events::new();
        let events = self.contention.measure(time, || events.wait(&self.epoll, time));
        worker.asleep.store(false, Ordering::Relaxed);
        if self.events(worker, events) || busy {
            self.active = Instant::now();
        } else if spinning {
            // The kernel's thread for what was sent over loopback may wait for this core.
            self.contention.measure(Duration::ZERO, std::thread::yield_now);
        }
        self.sweep();
    }

    /// Handles events; true when there are some.
    fn events(&mut self, worker: &Worker, events: &[epoll::Event]) -> bool {
        for event in events {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == BELL { worker.bell.drain() } else { self.event(key, flags) }
        }
        !events.is_empty()
    }

    /// Finishes before the thread ends: what was sent over closed connections must reach the peers' kernels. Closing a
    /// socket with bytes in it that no thread has read would reset the connection.
    fn finish(&mut self, worker: &Worker) {
        self.tasks(worker);
        let until = Instant::now() + LINGER;
        let slice = Duration::from_millis(10);
        while self.streams.values().any(Served::has_unsent) && Instant::now() < until {
            self.events(worker, Events::new().wait(&self.epoll, slice));
        }
    }

    fn sleep_for(&self) -> Duration {
        let most = if self.lingering > 0 { SLICE } else { Duration::from_secs(3600) };
        let next = self.held.iter().map(|(_, until)| *until).min();
        next.map_or(most, |next| next.saturating_duration_since(Instant::now()).min(most))
    }

    /// Executes the tasks of other threads; true when there were some.
    fn tasks(&mut self, worker: &Worker) -> bool {
        if !worker.any.swap(false, Ordering::AcqRel) {
            return false;
        }
        let tasks = lock(&worker.inbox).as_mut().map(std::mem::take).unwrap_or_default();
        for task in tasks {
            match task {
                Task::Add(connection, stream) => self.add(connection, stream),
                Task::Work(connection, stream) => {
                    // For whichever stream has the position now.
                    if let Some(of) = connection.beside(stream) {
                        of.queued.store(false, Ordering::Release);
                        let stream = of.number();
                        if lock(&of.writer).pump(&connection, stream, usize::MAX) == Remaining::More {
                            connection.wake(stream);
                        }
                    }
                }
                Task::Read(connection, stream) => {
                    if let Some(of) = connection.stream(stream) {
                        self.again.push(of.key.load(Ordering::Relaxed));
                    }
                }
                Task::Leave(connection, stream) => {
                    if let Some(of) = connection.stream(stream) {
                        // Its thread gives it another key when another one begins in its position.
                        if lock(&of.reader).retire(&connection, stream) {
                            self.remove(of.key.load(Ordering::Relaxed));
                        }
                    }
                }
                Task::Watch(connection, queue) => self.watch(connection, queue),
                Task::Unwatch(connection, queue) => {
                    if let Some(fd) = connection.rdma.watched(queue) {
                        // It may never have been added.
                        let _ = epoll::delete(&self.epoll, fd);
                    }
                    self.queues.retain(|_, (of, number)| *number != queue || !Arc::ptr_eq(of, &connection));
                }
                Task::Hear(devices) => self.hear(&devices),
                Task::Close { connection, stream, linger } => self.close(&connection, stream, linger),
            }
        }
        true
    }

    fn add(&mut self, connection: Arc<Connection>, stream: usize) {
        let Some(of) = connection.stream(stream) else { return };
        self.next_key += 1;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if let Err(e) = epoll::add(&self.epoll, of, epoll::EventData::new_u64(self.next_key), flags) {
            connection.fail(format!("waiting for stream {stream}: {}", std::io::Error::from(e)));
        }
        // The one before it in its position left the epoll when its socket was closed.
        self.streams.remove(&of.key.swap(self.next_key, Ordering::Relaxed));
        self.streams.insert(self.next_key, Served { connection, stream, until: None });
    }

    fn watch(&mut self, connection: Arc<Connection>, queue: usize) {
        let Some(fd) = connection.rdma.watched(queue) else { return };
        self.next_key += 1;
        if let Err(e) = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(self.next_key), epoll::EventFlags::IN) {
            connection.fail(format!("waiting for a queue pair: {}", std::io::Error::from(e)));
        }
        self.queues.insert(self.next_key, (connection, queue));
    }

    fn hear(&mut self, devices: &Arc<Devices>) {
        for (number, fd) in devices.watched() {
            self.next_key += 1;
            match epoll::add(&self.epoll, fd, epoll::EventData::new_u64(self.next_key), epoll::EventFlags::IN) {
                Ok(()) => drop(self.devices.insert(self.next_key, (devices.clone(), number))),
                Err(e) => log::warn!("net: waiting for events of an RDMA device: {}", std::io::Error::from(e)),
            }
        }
    }

    fn close(&mut self, connection: &Arc<Connection>, stream: usize, linger: bool) {
        let Some(key) = connection.stream(stream).map(|of| of.key.load(Ordering::Relaxed)) else { return };
        let Some(served) = self.streams.get_mut(&key) else { return };
        if linger {
            served.until = Some(Instant::now() + LINGER);
            self.lingering += 1;
            // What came before is read now, the end with the event that it makes.
            self.event(key, epoll::EventFlags::IN);
        } else {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: u64) {
        let Some(Served { connection, stream, until }) = self.streams.remove(&key) else { return };
        self.lingering -= usize::from(until.is_some());
        if let Some(of) = connection.stream(stream) {
            // The socket goes with the last stream of the connection, and no event of it must come before.
            let _ = epoll::delete(&self.epoll, of);
        }
    }

    /// Handles the events of a device; one that is lost is not watched any more.
    fn said(&mut self, key: u64) {
        let Some((devices, number)) = self.devices.get(&key) else { return };
        if !devices.event(*number) {
            if let Some((_, fd)) = devices.watched().nth(*number) {
                let _ = epoll::delete(&self.epoll, fd);
            }
            self.devices.remove(&key);
        }
    }

    fn event(&mut self, key: u64, flags: epoll::EventFlags) {
        if let Some((connection, queue)) = self.queues.get(&key) {
            connection.rdma.event(connection, *queue);
            return;
        }
        let Some(Served { connection, stream, until }) = self.streams.get(&key) else { return self.said(key) };
        self.held.retain(|(held, _)| *held != key);
        let Some(of) = connection.stream(*stream) else { return };
        let mut left = Remaining::Nothing;
        let end = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let mut over = false;
        if flags.intersects(epoll::EventFlags::IN | end) {
            let mut reader = lock(&of.reader);
            left = reader.pump(connection, *stream, flags.intersects(end));
            over = until.is_some() && reader.is_over();
        }
        {
            let mut writer = lock(&of.writer);
            if flags.contains(epoll::EventFlags::OUT) {
                writer.unblock();
            }
            if writer.pump(connection, *stream, usize::MAX) == Remaining::More {
                left = Remaining::More;
            }
        }
        match left {
            _ if over => self.remove(key),
            Remaining::More => self.again.push(key),
            Remaining::Held(until) => self.held.push((key, until)),
            Remaining::Nothing => {}
        }
    }

    /// Serves the streams that have more to do; true when there were some.
    fn turns(&mut self) -> bool {
        let mut again = std::mem::take(&mut self.again);
        if !self.held.is_empty() {
            let now = Instant::now();
            again.extend(self.held.extract_if(.., |(_, until)| *until <= now).map(|(key, _)| key));
        }
        let any = !again.is_empty();
        for key in again {
            // The end of the stream, if it has come, is read where it is.
            self.event(key, epoll::EventFlags::IN | epoll::EventFlags::RDHUP);
        }
        any
    }

    /// Removes the streams of closed connections whose time is over.
    fn sweep(&mut self) {
        if self.lingering > 0 {
            let now = Instant::now();
            let late: Vec<u64> =
                self.streams.iter().filter(|(_, s)| s.until.is_some_and(|u| u <= now)).map(|(k, _)| *k).collect();
            late.into_iter().for_each(|key| self.remove(key));
        }
    }
}
