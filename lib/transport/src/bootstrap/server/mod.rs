//! The rendezvous store as a server: one thread, one poll loop, a deadline for everything.

mod clients;
mod entrance;
pub(in crate::bootstrap) mod store;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use self::clients::{Client, Phase};
use super::UniqueId;
use super::environment::interface;
use super::environment::local_rendezvous::HandOut;
use super::wire::admission::{self, Generation};
use super::wire::connection::Connection;
use crate::seal;
use store::{Standing, Store, Went};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::{Kept, Origin};
use tinynccl_sys::half_open::{self, Source};
use tinynccl_sys::secret::Secret;
use tinynccl_sys::strangers::Strangers;
use tinynccl_sys::threads::{Thread, deadline_after, left, lock, poll};

/// A client that has not registered within this time is dropped.
const REGISTER_LIMIT: Duration = Duration::from_secs(10);
/// Clients above the world size that may be connected without having proven themselves; addresses share them.
const STRANGERS: usize = 128;
/// Ranks that are expected at once where their number is not known.
const UNKNOWN_SIZE: usize = 4096;
/// Dropping the server waits this long for the ranks to say goodbye.
pub(super) const LINGER: Duration = Duration::from_secs(3);
/// After that the last messages may take this long.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Clients accepted in one step: between two, the oldest unauthenticated connections are closed.
const ACCEPTS: usize = 256;
/// Pause after `accept` failed, for instance for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running store. Dropping it waits a bounded time (3.5 s) until every registered rank said goodbye or is gone,
/// then stops it, or, after [`Server::open`], leaves it to the ranks that are still there. After a failure of the
/// communicator of all ranks it waits only until all have been notified (half a second at most).
#[derive(Debug)]
pub struct Server {
    id: UniqueId,
    orders: Arc<Orders>,
    went: Went,
    thread: Thread,
    origin: Origin,
    /// Hands the id to the other ranks of this host, where they get it from nowhere else.
    pub(crate) hand_out: Option<HandOut>,
}

/// Looks at a store, also after its owner has dropped it.
#[derive(Debug, Clone)]
pub struct Observer(Arc<Orders>);

impl Observer {
    /// Returns the progress of its ranks' rendezvous, as of the last round of the store's loop.
    pub fn standing(&self) -> Standing {
        match self.0.standing.load(Ordering::Acquire) {
            0 => Standing::Empty,
            1 => Standing::Waiting,
            2 => Standing::Formed,
            _ => Standing::Over,
        }
    }
}

#[derive(Debug)]
struct Orders {
    /// A [`Standing`].
    standing: AtomicU8,
    stop: AtomicBool,
    bell: Arc<Doorbell>,
    /// Ranks whose processes have failed, with a text each.
    failed: Mutex<Vec<(usize, String)>>,
    /// True once the job is being ended from outside: lost ranks are logged at debug level.
    interrupted: AtomicBool,
    life: Mutex<Life>,
    changed: Condvar,
}

/// Stage of the store, for its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Serves,
    /// It serves without its owner, until the ranks have left.
    GoesOn,
    Ended,
}

impl Orders {
    fn enter(&self, life: Life) {
        *lock(&self.life) = life;
        self.changed.notify_all();
    }
}

/// The store has ended, however.
struct Ends(Arc<Orders>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.standing.store(Standing::Over as u8, Ordering::Release);
        self.0.enter(Life::Ended);
    }
}

impl Server {
    /// Listens at `bind` (port 0: any free one) for the `world_size` ranks that get its id, which holds a new random
    /// secret.
    ///
    /// An unspecified address (`0.0.0.0`, `::`) listens everywhere and advertises the addresses that `config.interface`
    /// allows.
    pub fn start(bind: SocketAddr, world_size: usize, config: &Config) -> Result<Server> {
        Server::start_with(bind, Secret::random()?, world_size, config, LINGER)
    }

    /// [`Server::start`] for ranks that know `secret`, and whose number is not known yet: the first rank that registers
    /// sets it. `ncclGetUniqueId` makes an id before the number of its ranks is known.
    ///
    /// NCCL's communicators do not need those that they were split from. So this store goes on after it was dropped, as
    /// long as this process and one of the ranks live. Ranks that do not fit together (one number twice, two sizes)
    /// will never be complete, and nothing else ends their wait: all of them are notified at once.
    pub fn open(bind: SocketAddr, secret: Secret, config: &Config) -> Result<Server> {
        Server::listen(bind, secret, None, true, config, LINGER)
    }

    /// [`Server::start`] for the ranks that know `secret`, whose number the first one sets.
    pub fn start_unsized(bind: SocketAddr, secret: Secret, config: &Config) -> Result<Server> {
        Server::listen(bind, secret, None, false, config, LINGER)
    }

    /// [`Server::start`] for the ranks whose id holds `secret`; dropping it waits `linger` at most for goodbyes.
    pub(crate) fn start_with(
        bind: SocketAddr,
        secret: Secret,
        world_size: usize,
        config: &Config,
        linger: Duration,
    ) -> Result<Server> {
        if world_size == 0 || world_size > u32::MAX as usize {
            let detail = format!("world size {world_size} is not between 1 and 2^32-1");
            return Err(Error::invalid("rendezvous store", detail));
        }
        Server::listen(bind, secret, Some(world_size), false, config, linger)
    }

    /// Starts a store. If it `goes_on`, it serves the ranks that are there also `linger` after it was dropped.
    pub(super) fn listen(
        bind: SocketAddr,
        secret: Secret,
        world_size: Option<usize>,
        goes_on: bool,
        config: &Config,
        linger: Duration,
    ) -> Result<Server> {
        if config.encrypt {
            seal::is_possible()?;
        }
        let failed = |detail: String| Error::bootstrap(bind, detail);
        let listener = TcpListener::bind(bind).map_err(|e| {
            let port = bind.port();
            failed(match e.kind() {
                std::io::ErrorKind::AddrInUse => {
                    format!("port {port} is in use by another process: choose another port, or end that process")
                }
                std::io::ErrorKind::AddrNotAvailable => format!("{} is not an address of this host", bind.ip()),
                _ => format!("the store cannot listen: {e}"),
            })
        })?;
        // std sets a backlog of 128; many ranks connect at once. Listening again only lengthens the queue.
        let _ = rustix::net::listen(&listener, 4096);
        listener.set_nonblocking(true).map_err(|e| failed(e.to_string()))?;
        let address = listener.local_addr().map_err(|e| failed(e.to_string()))?;
        let id = UniqueId::new(secret, advertised(address, config)?);
        let prefix = format!("rendezvous store at {address}: turned away");
        let orders = Arc::new(Orders {
            standing: AtomicU8::new(Standing::Empty as u8),
            stop: AtomicBool::new(false),
            bell: Doorbell::new()?,
            failed: Mutex::default(),
            interrupted: AtomicBool::new(false),
            life: Mutex::new(Life::Serves),
            changed: Condvar::new(),
        });
        let state = Loop {
            listener: Kept::new(listener),
            secret: admission::join_secret(&secret, config)?,
            encrypt: config.encrypt,
            generation: admission::generation()?,
            addresses: id.addresses().to_vec(),
            store: Store::new(world_size),
            clients: Vec::new(),
            by_rank: HashMap::new(),
            next_id: 0,
            tick: config.heartbeat.clamp(Duration::from_millis(10), Duration::from_secs(1)),
            strangers: world_size.unwrap_or(UNKNOWN_SIZE).saturating_add(STRANGERS),
            closing: false,
            interrupted: false,
            linger,
            goes_on,
            accept_again: None,
            // Clients with the right secret are logged separately: their errors are the job's own.
            rejections: Strangers::new(format!("{prefix}, unproven:")),
            refused_seen: Strangers::new(prefix),
        };
        let went = state.store.went();
        let for_thread = Ends(Arc::clone(&orders));
        let what = "the thread of the rendezvous store".to_owned();
        let run = move || {
            let ends = for_thread;
            state.run(&ends.0);
        };
        let thread = Thread::start("rendezvous store", "tinynccl-store".to_owned(), what, run)?;
        let ranks = world_size.map_or_else(|| "any number of".to_owned(), |size| size.to_string());
        log::debug!("rendezvous store for {ranks} ranks at {}", id.address_list());
        Ok(Server { id, orders, went, thread, origin: Origin::here(), hand_out: None })
    }

    /// Called by the launcher: the process of `rank` has failed; `how` is the text. If it has not joined yet it never
    /// will, and the ranks that wait for it are notified; later its connection shows it.
    pub fn rank_failed(&self, rank: usize, how: String) {
        lock(&self.orders.failed).push((rank, how));
        self.orders.bell.ring();
    }

    /// Called by the launcher: a signal ends the job. Lost ranks are still reported, but logged without a warning.
    pub fn interrupted(&self) {
        self.orders.interrupted.store(true, Ordering::Relaxed);
    }

    /// Returns to the launcher the ranks that are gone or going, the first one first; with the reason, unless it said
    /// goodbye.
    pub fn went(&self) -> Vec<(usize, Option<String>)> {
        lock(&self.went).clone()
    }

    /// Returns an observer, which shows when the ranks have come, and when they have left.
    pub fn observer(&self) -> Observer {
        Observer(Arc::clone(&self.orders))
    }

    /// Waits for the end of the store, also after this was dropped.
    #[cfg(test)]
    pub(super) fn watch(&self) -> impl FnOnce() + use<> {
        let orders = Arc::clone(&self.orders);
        move || {
            let alive = |life: &mut Life| *life != Life::Ended;
            drop(orders.changed.wait_while(lock(&orders.life), alive).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Returns the id with which the ranks join.
    pub fn unique_id(&self) -> UniqueId {
        self.id.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return std::mem::forget(self.hand_out.take());
        }
        self.hand_out = None;
        self.orders.stop.store(true, Ordering::Release);
        self.orders.bell.ring();
        let serves = |life: &mut Life| *life == Life::Serves;
        let life = self.orders.changed.wait_while(lock(&self.orders.life), serves);
        let life = *life.unwrap_or_else(PoisonError::into_inner);
        match life {
            Life::GoesOn => self.thread.leave(),
            _ => self.thread.join(),
        }
    }
}

/// The addresses at which a listener bound to `bound` can be reached.
fn advertised(bound: SocketAddr, config: &Config) -> Result<Vec<SocketAddr>> {
    if !bound.ip().is_unspecified() {
        return Ok(vec![bound]);
    }
    let local = interface::local_addresses(config)?;
    let reachable = |ip: IpAddr| bound.is_ipv6() || ip.is_ipv4();
    let all: Vec<_> = local.iter().filter(|a| reachable(a.ip)).collect();
    // Loopback only where there is nothing else: another host would try its own.
    let chosen: Vec<_> = match all.iter().any(|a| !a.loopback) {
        true => all.into_iter().filter(|a| !a.loopback).collect(),
        false => all,
    };
    let mut addresses: Vec<SocketAddr> = chosen.iter().map(|a| SocketAddr::new(a.ip, bound.port())).take(16).collect();
    if addresses.is_empty() {
        let loopback = if bound.is_ipv4() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { IpAddr::V6(Ipv6Addr::LOCALHOST) };
        addresses.push(SocketAddr::new(loopback, bound.port()));
    }
    Ok(addresses)
}

struct Loop {
    listener: Kept<TcpListener>,
    secret: Secret,
    /// Clients must encrypt.
    encrypt: bool,
    generation: Generation,
    addresses: Vec<SocketAddr>,
    store: Store,
    clients: Vec<Client>,
    by_rank: HashMap<usize, u64>,
    next_id: u64,
    tick: Duration,
    strangers: usize,
    closing: bool,
    interrupted: bool,
    linger: Duration,
    goes_on: bool,
    accept_again: Option<Instant>,
    rejections: Strangers,
    refused_seen: Strangers,
}

impl Drop for Loop {
    /// Ends the listening, also where a process that is just being started has a copy of the descriptor.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
    }
}

impl Loop {
    fn run(mut self, orders: &Orders) {
        let mut next_tick = deadline_after(self.tick);
        let mut end = None;
        let mut last_words = false;
        loop {
            if orders.stop.load(Ordering::Acquire) && !self.closing {
                self.closing = true;
                end = Some(deadline_after(self.linger));
            }
            if self.closing {
                let late = end.is_some_and(|at| Instant::now() >= at);
                let quiet = self.store.finished() && !self.clients.iter().any(|c| c.connection.has_unsent());
                if quiet || (last_words && late) {
                    return;
                }
                if late && self.goes_on && !self.store.failed() {
                    log::debug!("rendezvous store: its owner has left it, ranks have not: it goes on");
                    end = None;
                    orders.enter(Life::GoesOn);
                } else if (late || self.store.failed()) && !last_words {
                    last_words = true;
                    end = Some(deadline_after(LAST_WORDS));
                    self.say_closing();
                } else if last_words && !self.clients.iter().any(|c| c.connection.has_unsent()) {
                    return;
                }
            }
            if let Err(e) = self.wait(orders, next_tick) {
                // Poll fails only for want of memory: try again rather than give the job up.
                log::warn!("rendezvous store: poll: {e}");
                std::thread::sleep(ACCEPT_PAUSE);
            }
            for (rank, how) in std::mem::take(&mut *lock(&orders.failed)) {
                self.store.never_comes(rank, &how);
                self.deliver();
            }
            if Instant::now() >= next_tick {
                next_tick = deadline_after(self.tick);
                self.store.tick();
                self.deliver();
                self.expire();
                self.rejections.tick();
                self.refused_seen.tick();
            }
            self.clients.retain(|c| c.phase != Phase::Gone);
            orders.standing.store(self.store.standing() as u8, Ordering::Release);
        }
    }

    /// Waits for something to do, at most until `until`, and does it.
    fn wait(&mut self, orders: &Orders, until: Instant) -> std::io::Result<()> {
        let accepting = self.accept_again.is_none_or(|at| Instant::now() >= at);
        // A stream that is over would end every wait.
        let open: Vec<usize> = (0..self.clients.len()).filter(|&i| self.clients[i].over.is_none()).collect();
        let ready: Vec<PollFlags> = {
            let mut fds = Vec::with_capacity(open.len() + 2);
            fds.push(PollFd::new(&orders.bell, PollFlags::IN));
            let listen = if accepting { PollFlags::IN } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(self.listener.as_fd(), listen));
            let connections = open.iter().map(|&index| &self.clients[index].connection);
            fds.extend(connections.map(|c| PollFd::from_borrowed_fd(c.fd(), c.interest())));
            poll(&mut fds, left(until))?;
            self.interrupted = orders.interrupted.load(Ordering::Relaxed);
            fds.iter().map(PollFd::revents).collect()
        };
        let mut ready = ready.into_iter();
        if ready.next().is_some_and(|r| !r.is_empty()) {
            orders.bell.drain();
        }
        let connecting = ready.next().is_some_and(|r| !r.is_empty());
        for (index, events) in open.into_iter().zip(ready) {
            if !events.is_empty() {
                self.serve(index);
            }
        }
        if connecting {
            self.accept();
        }
        Ok(())
    }

    fn accept(&mut self) {
        self.accept_again = None;
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, address)) => match Connection::new(stream, self.encrypt) {
                    Ok(connection) => {
                        self.next_id += 1;
                        self.clients.push(Client {
                            id: self.next_id,
                            connection,
                            source: Source::of(address.ip()),
                            address: address.to_string(),
                            phase: Phase::Hello,
                            until: deadline_after(REGISTER_LIMIT),
                            over: None,
                            tries: 0,
                        });
                    }
                    Err(e) => log::debug!("rendezvous store: {address}: {e}"),
                },
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e)
                    if matches!(e.kind(), std::io::ErrorKind::Interrupted | std::io::ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    log::warn!("rendezvous store: accept: {e}");
                    self.accept_again = Some(deadline_after(ACCEPT_PAUSE));
                    break;
                }
            }
        }
        // A client that has proven itself stays.
        let unproven = |c: &Client| {
            matches!(c.phase, Phase::Hello | Phase::Seal { .. } | Phase::Prove { .. } | Phase::Ending { .. })
        };
        let places: Vec<usize> = (0..self.clients.len()).filter(|&place| unproven(&self.clients[place])).collect();
        let crowd = places.iter().map(|&place| {
            let client = &self.clients[place];
            (client.source, matches!(client.phase, Phase::Seal { .. } | Phase::Prove { .. }))
        });
        for gone in half_open::excess(crowd, self.strangers) {
            self.clients[places[gone]].phase = Phase::Gone;
        }
    }
}
