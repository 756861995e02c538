//! A thread that reads and writes sockets, so that NCCL's own never waits for one. Where a connection's owner waits for
//! it anyway, it drives this thread's progress inline: a handover to a thread and back takes longer than a short
//! message. On a host with few cores, where these threads sleep, so does a thread that tests a request for a short
//! message.

use std::collections::HashMap;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;

use crate::bootstrap::unacknowledged;
use crate::rails::worker::activity::Activity;
use crate::rails::worker::contention::Contention;
use crate::rails::worker::service::{Remaining, Service};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::threads::{Thread, lock, poll, try_lock};

/// Longest time that the socket of a closed connection waits for the peer to close, too.
const LINGER: Duration = Duration::from_secs(5);
/// Time between two checks of such sockets.
const SLICE: Duration = Duration::from_millis(200);
/// Time for which a thread leaves its work to an owner that did it a moment ago.
const INLINE_LEASE: Duration = Duration::from_millis(2);
/// The bell's key among events.
const BELL: u64 = 0;

/// Something to do for a worker thread, with what it serves under a key.
pub(in crate::rails) enum Job {
    /// Serve this from now on. `edge`: a stream, which reports each change once, also that it takes more.
    Add { key: u64, service: Box<dyn Service>, edge: bool },
    /// There may be something to send.
    Write(u64),
    /// There may be something to read, though no event reports it.
    Read(u64),
    /// Serve it no longer.
    Remove(u64),
    /// The owner has closed it; what is in the kernel should still arrive.
    Linger(u64),
}

/// State shared with the worker thread.
#[derive(Debug)]
pub(in crate::rails) struct Worker {
    bell: Arc<Doorbell>,
    /// Jobs for the thread; `None` once it has ended.
    inbox: Mutex<Option<Vec<Job>>>,
    any: AtomicBool,
    asleep: AtomicBool,
    stop: AtomicBool,
    /// Number of times that an owner has driven the thread's progress inline.
    turns: AtomicUsize,
    epoll: Arc<OwnedFd>,
    next_key: AtomicU64,
    run: Mutex<Run>,
}

/// Times for which a thread spins, in search of something to do, before it sleeps.
#[derive(Debug, Clone, Copy)]
pub(in crate::rails) struct Spins {
    pub(in crate::rails) idle: Duration,
    /// Time to spin while requests are open.
    pub(in crate::rails) busy: Duration,
}

impl Worker {
    /// Starts the thread of number `index`.
    pub(in crate::rails) fn start(
        index: usize,
        spins: Spins,
        activity: &Arc<Activity>,
    ) -> Result<(Arc<Worker>, Thread)> {
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
            services: HashMap::new(),
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
            next_key: AtomicU64::new(BELL + 1),
            run: Mutex::new(run),
        });
        let (name, what) = (format!("tinynccl-net{index}"), "a thread of the network".to_owned());
        let ours = worker.clone();
        let thread = Thread::start("net", name, what, move || ours.run())?;
        Ok((worker, thread))
    }

    /// Has the thread end once it has finished.
    pub(in crate::rails) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Returns a key under which the worker has nothing yet.
    pub(in crate::rails) fn new_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub(in crate::rails) fn push(&self, job: Job) {
        match &mut *lock(&self.inbox) {
            Some(inbox) => inbox.push(job),
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

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Job::Add { key, .. } => write!(f, "Add({key})"),
            Job::Write(key) => write!(f, "Write({key})"),
            Job::Read(key) => write!(f, "Read({key})"),
            Job::Remove(key) => write!(f, "Remove({key})"),
            Job::Linger(key) => write!(f, "Linger({key})"),
        }
    }
}

/// A descriptor that this thread serves.
struct Served {
    service: Box<dyn Service>,
    /// Time at which it goes at the latest, as its owner is gone; `None` while it has one.
    until: Option<Instant>,
}

impl Served {
    /// Returns true if the owner has closed it, and the peer's kernel does not have all of its bytes yet.
    fn has_unsent(&self) -> bool {
        self.until.is_some() && self.service.fd().is_some_and(|fd| unacknowledged(fd) > 0)
    }
}

/// Descriptors that a thread serves. Owners of connections drive their progress inline while they wait, and the thread
/// when they do not.
struct Run {
    epoll: Arc<OwnedFd>,
    activity: Arc<Activity>,
    spins: Spins,
    /// Time at which there was something to do last.
    active: Instant,
    contention: Contention,
    services: HashMap<u64, Served>,
    /// Keys of services whose time slice was over before they were done.
    again: Vec<u64>,
    /// Keys of services that wait, each with the time at which it is read again.
    held: Vec<(u64, Instant)>,
    /// Services whose owner is gone.
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

/// Without its services, which name their workers.
impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("services", &self.services.len()).finish_non_exhaustive()
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
        for served in run.services.values() {
            served.service.fail("its network was shut down before it was closed");
        }
        run.services.clear();
    }

    /// Drives the worker's progress inline, on the thread of an owner that waits for its connection, unless another
    /// thread does. The worker's own thread stays away from then on, until no owner has come for a while.
    pub(in crate::rails) fn drive_progress(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        if let Some(mut run) = try_lock(&self.run) {
            run.jobs(self);
            run.turns();
            run.events(self, Events::new().wait(&self.epoll, Duration::ZERO));
            run.sweep();
        }
    }

    /// Has the worker's own thread do its work again, though an owner has done it a moment ago.
    pub(in crate::rails) fn hand_back(&self) {
        self.bell.ring();
    }

    /// Readable when [`Worker::drive_progress`] has something to do.
    pub(in crate::rails) fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

impl Run {
    /// Runs one round of the worker thread.
    fn round(&mut self, worker: &Worker) {
        let mut busy = self.jobs(worker);
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
        self.jobs(worker);
        let until = Instant::now() + LINGER;
        let slice = Duration::from_millis(10);
        while self.services.values().any(Served::has_unsent) && Instant::now() < until {
            self.events(worker, Events::new().wait(&self.epoll, slice));
        }
    }

    fn sleep_for(&self) -> Duration {
        let most = if self.lingering > 0 { SLICE } else { Duration::from_secs(3600) };
        let next = self.held.iter().map(|(_, until)| *until).min();
        next.map_or(most, |next| next.saturating_duration_since(Instant::now()).min(most))
    }

    /// Executes the jobs from other threads; true when there were some.
    fn jobs(&mut self, worker: &Worker) -> bool {
        if !worker.any.swap(false, Ordering::AcqRel) {
            return false;
        }
        let jobs = lock(&worker.inbox).as_mut().map(std::mem::take).unwrap_or_default();
        for job in jobs {
            match job {
                Job::Add { key, service, edge } => self.add(key, service, edge),
                Job::Write(key) => {
                    let served = self.services.get(&key);
                    if served.is_some_and(|served| served.service.writable(false) == Remaining::More) {
                        worker.push(Job::Write(key));
                    }
                }
                Job::Read(key) => self.again.push(key),
                Job::Remove(key) => self.remove(key),
                Job::Linger(key) => self.linger(key),
            }
        }
        true
    }

    fn add(&mut self, key: u64, service: Box<dyn Service>, edge: bool) {
        let flags = match edge {
            true => epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET,
            false => epoll::EventFlags::IN,
        };
        if let Some(fd) = service.fd()
            && let Err(e) = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key), flags)
        {
            log::warn!("net: waiting for events: {}", std::io::Error::from(e));
            service.fail(&format!("waiting for its events: {}", std::io::Error::from(e)));
        }
        // Another descriptor under the same key left the epoll when it was closed.
        let before = self.services.insert(key, Served { service, until: None });
        self.lingering -= usize::from(before.is_some_and(|before| before.until.is_some()));
    }

    /// Serves a stream whose owner is gone until the peer has closed it, too, or [`LINGER`] is over.
    fn linger(&mut self, key: u64) {
        let Some(served) = self.services.get_mut(&key) else { return };
        served.until = Some(Instant::now() + LINGER);
        self.lingering += 1;
        // What came before is read now, the end with the event that it makes.
        self.event(key, epoll::EventFlags::IN);
    }

    fn remove(&mut self, key: u64) {
        let Some(Served { service, until }) = self.services.remove(&key) else { return };
        self.lingering -= usize::from(until.is_some());
        self.unwatch(&*service);
    }

    /// Takes a descriptor out of the epoll: others may hold it open, and no event of it must come.
    fn unwatch(&self, service: &dyn Service) {
        if let Some(fd) = service.fd() {
            // It may never have been added.
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    fn event(&mut self, key: u64, flags: epoll::EventFlags) {
        let Some(Served { service, until }) = self.services.get(&key) else { return };
        self.held.retain(|(held, _)| *held != key);
        let end = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let mut remaining = Remaining::Nothing;
        if flags.intersects(epoll::EventFlags::IN | end) {
            remaining = service.readable(flags.intersects(end));
        }
        let more = service.writable(flags.contains(epoll::EventFlags::OUT)) == Remaining::More;
        match remaining {
            Remaining::Ended if until.is_some() => self.remove(key),
            Remaining::Unwatch => self.unwatch(&**service),
            _ if more => self.again.push(key),
            Remaining::More => self.again.push(key),
            Remaining::Held(until) => self.held.push((key, until)),
            Remaining::Nothing | Remaining::Ended => {}
        }
    }

    /// Serves those that have more to do; true when there were some.
    fn turns(&mut self) -> bool {
        let mut again = std::mem::take(&mut self.again);
        if !self.held.is_empty() {
            let now = Instant::now();
            again.extend(self.held.extract_if(.., |(_, until)| *until <= now).map(|(key, _)| key));
        }
        let any = !again.is_empty();
        for key in again {
            // The end of a stream, if it has come, is read where it is.
            self.event(key, epoll::EventFlags::IN | epoll::EventFlags::RDHUP);
        }
        any
    }

    /// Removes closed services whose time is over.
    fn sweep(&mut self) {
        if self.lingering > 0 {
            let now = Instant::now();
            let late: Vec<u64> =
                self.services.iter().filter(|(_, s)| s.until.is_some_and(|u| u <= now)).map(|(k, _)| *k).collect();
            late.into_iter().for_each(|key| self.remove(key));
        }
    }
}
