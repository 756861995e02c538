//! The engine: one for each RDMA device that a process has open. It moves packets between sockets and queue pairs.
//!
//! One thread waits for packets and timers, and sleeps while there are none. A thread that posts a request sends its
//! packets at once, as the doorbell of an RDMA device starts them: the engine's thread is not woken for that. A second
//! thread helps to receive where much comes in.
//!
//! | file | idea |
//! | --- | --- |
//! | `slot` | slots: the queue pairs of each process |
//! | `sockets`, `sockaddr` | sockets and their addresses |
//! | `steer` | packets of other hosts reach a process that reads them |
//! | `forward` | packets handed on between processes |
//! | `send`, `control` | packets to datagrams |
//! | `timer` | the one timer |
//! | `cell` | a queue pair as threads share it |
//! | `recv` | datagrams to queue pairs |
//! | `run` | the thread |
//! | `assistant` | the second thread |
//! | `faults`, `trace` | packets lost, held back and written to a file, for learners |
//! | `polling` | programs that poll do the thread's work |
//! | `exit` | the end of the process |
//! | `watch`, `growing` | addresses that come and go, the interface up and down |

mod assistant;
mod cell;
mod control;
mod exit;
pub(crate) mod faults;
mod forward;
mod growing;
mod polling;
mod recv;
mod run;
mod send;
pub(crate) mod slot;
mod sockaddr;
mod sockets;
mod steer;
mod timer;
mod trace;
mod watch;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, TryLockError, Weak};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, epoll, eventfd};
use socket2::Socket;

use assistant::Assistant;
pub(crate) use cell::Cell;
use faults::Faults;
use growing::Growing;
use polling::Polling;
use recv::Receiving;
use slot::Slot;
use sockets::{Listener, Sender};
use steer::Steer;
use timer::Timer;
use watch::Watch;

use crate::error::{Error, Result};
use crate::fork::{Origin, Own};
use crate::gids::GidTable;
use crate::memory::{Table, begin_turn};
use crate::qp::Machine;
use crate::queue::event::Events;
use crate::sync::{lock, read, write};

/// Nanoseconds of the monotonic clock.
pub(crate) fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Sockets of either kind that an RDMA device opens at most: for all addresses that its interface ever has.
const MAX_SOCKETS: usize = 512;

/// State that the engine's thread and all other threads share.
pub(crate) struct Shared {
    pub(crate) interface: String,
    /// Number of the interface.
    pub(crate) scope: u32,
    pub(crate) memory: RwLock<Table>,
    /// Sockets that packets arrive at; those of an address stay when the address goes.
    listeners: Growing<Listener>,
    senders: Growing<Sender>,
    /// Slot of this process; released after the sockets at its addresses.
    pub(crate) slot: Slot,
    watch: Watch,
    /// Queue pairs, by the lower bits of their numbers.
    cells: RwLock<Vec<Option<Arc<Cell>>>>,
    /// Numbers that were given back, the oldest first: a number rests before it is used again.
    free: Mutex<VecDeque<u32>>,
    /// Receiving sides, by the receive queue of the sockets: one thread at a time takes what came by one receive queue.
    receiving: [Mutex<Receiving>; slot::LANES],
    assistant: Assistant,
    /// Connections to RDMA devices of this host that have a receive queue.
    spread: AtomicUsize,
    /// Queue pairs with more to send.
    listed: Mutex<Vec<u32>>,
    timer: Timer,
    bell: Own<OwnedFd>,
    /// Epoll descriptor of the sockets and of everything in `control`.
    epoll: Own<OwnedFd>,
    /// Epoll descriptor of bell, timer and watch.
    control: Own<OwnedFd>,
    stop: AtomicBool,
    /// True once the kernel refused a datagram of several segments.
    no_segmentation: AtomicBool,
    domains: AtomicU32,
    complained: AtomicBool,
    /// Socket that hands packets on; `None` without a loopback network.
    carrier: Option<Own<Socket>>,
    polling: Polling,
    steer: Steer,
    faults: Faults,
}

impl Shared {
    fn open(interface: &str, scope: u32, addresses: &[IpAddr]) -> Result<Shared> {
        let fail = |e: rustix::io::Errno| Error::system("waiting for packets", &e.into());
        let mut slot = Slot::lease()?;
        // Without a loopback network processes of the host reach each other by the shared sockets alone.
        let own = |lane| match Listener::open(slot::address(slot.number, lane).ip(), 0, false) {
            Ok(mut own) => {
                own.lane = lane;
                Ok(Some(own))
            }
            Err(e) if e.errno() == libc::EADDRNOTAVAIL => Ok(None),
            Err(e) => Err(e),
        };
        let own = (0..slot::LANES).map(own).collect::<Result<Vec<_>>>()?;
        if own.iter().all(Option::is_some) {
            slot.offer_lanes()?;
        }
        let watch = Watch::new(interface);
        let epoll = Own::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(fail)?);
        let bell = Own::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(fail)?);
        let timer = Timer::new()?;
        let control = Own::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(fail)?);
        let add = |epoll: &Own<OwnedFd>, fd: &dyn AsFd, number| {
            epoll::add(epoll, fd.as_fd(), epoll::EventData::new_u64(number), epoll::EventFlags::IN).map_err(fail)
        };
        add(&control, &bell, run::BELL)?;
        add(&control, &timer.fd, run::TIMER)?;
        if let Some(fd) = watch.fd() {
            add(&control, &fd, run::WATCH)?;
        }
        add(&epoll, &control, run::CONTROL)?;
        add(&epoll, &slot.socket, run::UNIX)?;
        let shared = Shared {
            interface: interface.to_owned(),
            scope,
            slot,
            memory: RwLock::default(),
            listeners: Growing::new(MAX_SOCKETS),
            senders: Growing::new(MAX_SOCKETS),
            watch,
            cells: RwLock::default(),
            free: Mutex::default(),
            receiving: std::array::from_fn(|_| Mutex::new(Receiving::new())),
            assistant: Assistant::default(),
            spread: AtomicUsize::new(0),
            listed: Mutex::default(),
            timer,
            bell,
            epoll,
            control,
            stop: AtomicBool::new(false),
            no_segmentation: AtomicBool::new(false),
            domains: AtomicU32::new(1),
            complained: AtomicBool::new(false),
            polling: Polling::default(),
            steer: Steer::new(),
            carrier: if own.first().is_some_and(Option::is_some) { Some(sockets::carrier()?) } else { None },
            faults: Faults::from_environment()?,
        };
        for own in own.into_iter().flatten() {
            shared.listen(own)?;
        }
        for &ip in addresses {
            match shared.open_sockets(ip) {
                // A new IPv6 address, which the kernel still checks for duplicates on the network: it sends a message
                // once the address is there.
                Err(e) if e.errno() == libc::EADDRNOTAVAIL && ip.is_ipv6() => log::debug!("not yet: {e}"),
                result => result?,
            }
        }
        Ok(shared)
    }

    /// Opens the sockets of one of our addresses.
    fn open_sockets(&self, ip: IpAddr) -> Result<()> {
        let (listener, sender) = (Listener::open(ip, self.scope, true)?, Sender::open(ip, self.scope)?);
        let socket = self.listen(listener)?;
        self.senders.push(sender).map_err(|_| Error::full("an interface with too many addresses"))?;
        self.steer(socket);
        Ok(())
    }

    /// Takes packets from a socket as well; returns its index.
    fn listen(&self, listener: Listener) -> Result<usize> {
        let i = self.listeners.push(listener).map_err(|_| Error::full("an interface with too many addresses"))?;
        let Some(listener) = self.listeners.get(i) else { return Ok(i) };
        let data = epoll::EventData::new_u64(run::SOCKETS + i as u64);
        epoll::add(&self.epoll, listener, data, epoll::EventFlags::IN)
            .map_err(|e| Error::system("waiting for packets", &e.into()))?;
        Ok(i)
    }

    /// Reports the events of the interface to a context from now on.
    pub(crate) fn tell(&self, events: &Arc<Events>, gids: GidTable) {
        self.watch.add(events, gids);
    }

    /// The receive queue of a connection to an RDMA device of this host that begins to send long messages.
    fn next_lane(&self) -> usize {
        1 + self.spread.fetch_add(1, Ordering::Relaxed) % (slot::LANES - 1)
    }

    fn lane(&self, socket: Option<usize>) -> usize {
        socket.and_then(|socket| self.listeners.get(socket)).map_or(0, |listener| listener.lane)
    }

    /// Takes what waits in a socket, the slot's own for `None`, and answers. `true` where there may be more.
    fn receive(&self, socket: Option<usize>) -> bool {
        let lane = self.lane(socket);
        if self.assistant.has(lane) {
            return false;
        }
        let Some(receiving) = self.receiving.get(lane) else { return false };
        let mut receiving = lock(receiving);
        receiving.waits = false;
        self.receive_locked(&mut receiving, socket)
    }

    /// The receiving side of a socket's receive queue, if no other thread holds it.
    fn try_receiving(&self, socket: Option<usize>) -> Option<MutexGuard<'_, Receiving>> {
        match self.receiving.get(self.lane(socket))?.try_lock() {
            Ok(receiving) => Some(receiving),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn receive_locked(&self, receiving: &mut Receiving, socket: Option<usize>) -> bool {
        begin_turn();
        let table = read(&self.memory);
        let more = match socket {
            Some(i) => match self.listeners.get(i) {
                Some(listener) => receiving.drain_udp(self, listener, &table),
                None => false,
            },
            None => receiving.drain_unix(self, self.slot.socket.as_raw_fd(), &table),
        };
        let bytes = receiving.finish(self, &table);
        if bytes > 0 {
            self.polling.found(socket);
        }
        if self.polling.came(bytes) {
            self.assistant.expect(self.lane(socket));
        }
        more
    }

    /// The queue pair with this number.
    pub(crate) fn cell(&self, qpn: u32) -> Option<Arc<Cell>> {
        if slot::of(qpn) != self.slot.number {
            return None;
        }
        read(&self.cells).get((qpn & ((1 << slot::INDEX_BITS) - 1)) as usize)?.clone()
    }

    /// Makes a queue pair of a machine that `make` gets its number for.
    pub(crate) fn add(&self, make: impl FnOnce(u32) -> Machine) -> Result<(u32, Arc<Cell>)> {
        let mut cells = write(&self.cells);
        let limit = 1usize << slot::INDEX_BITS;
        let index = if cells.len() < limit {
            cells.push(None);
            cells.len() - 1
        } else {
            let rested = lock(&self.free).pop_front();
            rested.ok_or_else(|| Error::full(format!("a card has {limit} queue pairs at most")))? as usize
        };
        let qpn = self.slot.number << slot::INDEX_BITS | index as u32;
        let cell = Arc::new(Cell::new(make(qpn)));
        if let Some(place) = cells.get_mut(index) {
            *place = Some(cell.clone());
        }
        Ok((qpn, cell))
    }

    /// Takes a queue pair out: packets for it are dropped from here on.
    pub(crate) fn remove(&self, qpn: u32) {
        let index = qpn & ((1 << slot::INDEX_BITS) - 1);
        if let Some(place) = write(&self.cells).get_mut(index as usize) {
            *place = None;
        }
        lock(&self.free).push_back(index);
    }

    /// A number for a protection domain.
    pub(crate) fn domain(&self) -> u32 {
        self.domains.fetch_add(1, Ordering::Relaxed)
    }

    /// Leaves the rest of a queue pair's sends to the engine's thread.
    fn list(&self, qpn: u32, cell: &Cell) {
        if !cell.listed.swap(true, Ordering::AcqRel) {
            lock(&self.listed).push(qpn);
            self.ring();
        }
    }

    /// Returns true if there are queue pairs with more to send.
    fn has_listed(&self) -> bool {
        !lock(&self.listed).is_empty()
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn segmentation(&self) -> bool {
        // Packets that are held back leave one by one.
        self.faults.delay == 0 && !self.no_segmentation.load(Ordering::Relaxed)
    }

    fn send_failed(&self, error: &io::Error, to: &SocketAddr, segmented: bool) {
        let code = error.raw_os_error();
        if segmented && matches!(code, Some(libc::EIO | libc::EINVAL | libc::EOPNOTSUPP)) {
            log::info!("{} sends packets one by one: no UDP segmentation ({error})", self.interface);
            self.no_segmentation.store(true, Ordering::Relaxed);
        } else if !self.complained.swap(true, Ordering::Relaxed) {
            let hint = if code == Some(libc::EMSGSIZE) { "; a smaller path MTU than the queue pair's" } else { "" };
            log::warn!("sending to {to}: {error}{hint}; said once");
        }
    }
}

/// A running engine.
pub(crate) struct Engine {
    pub(crate) shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// The process that has the threads: a child of `fork` has none.
    pub(crate) origin: Origin,
}

/// Engines of a process by the name of their interface.
struct Engines {
    origin: Origin,
    all: Mutex<HashMap<String, Weak<Engine>>>,
}

/// Engines of this process. A child of `fork` has its own: its parent's may be locked forever.
static ENGINES: AtomicPtr<Engines> = AtomicPtr::new(std::ptr::null_mut());

impl Engines {
    fn get() -> Option<&'static Engines> {
        // SAFETY: null, or what `of_here` made, which is never freed.
        unsafe { ENGINES.load(Ordering::Acquire).as_ref() }.filter(|engines| engines.origin.is_here())
    }

    fn of_here() -> &'static Engines {
        loop {
            if let Some(engines) = Engines::get() {
                return engines;
            }
            let old = ENGINES.load(Ordering::Acquire);
            let new = Box::into_raw(Box::new(Engines { origin: Origin::here(), all: Mutex::default() }));
            if ENGINES.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above, and no other thread has it.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
}

impl Engine {
    /// The engine of an interface, started where there is none in this process.
    pub(crate) fn of(interface: &str, scope: u32, addresses: &[IpAddr]) -> Result<Arc<Engine>> {
        let mut engines = lock(&Engines::of_here().all);
        if let Some(running) = engines.get(interface).and_then(Weak::upgrade) {
            return Ok(running);
        }
        let shared = Arc::new(Shared::open(interface, scope, addresses)?);
        let mut engine = Engine { shared: shared.clone(), threads: Vec::new(), origin: Origin::here() };
        engine.start(format!("roce-{interface}"), run::run)?;
        if shared.polling.to_spare() {
            engine.start(format!("roce-{interface}-2"), assistant::assist)?;
        }
        exit::register();
        let engine = Arc::new(engine);
        engines.insert(interface.to_owned(), Arc::downgrade(&engine));
        Ok(engine)
    }

    fn start(&mut self, name: String, work: fn(&Shared)) -> Result<()> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || work(&shared))
            .map_err(|e| Error::system("starting an engine's thread", &e))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
