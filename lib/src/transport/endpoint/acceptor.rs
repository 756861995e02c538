//! The thread that accepts connections and authenticates them, all of them at once, each within a bounded time.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{Inner, hop};
use crate::doorbell::Doorbell;
use crate::error::Result;
use crate::half_open::{self, Source};
use crate::secret::{Proof, Secret};
use crate::strangers::Strangers;
use crate::threads::{Thread, lock, poll};
use crate::transport::accept::conn::Conn;
use crate::transport::accept::handshake::{Challenge, Hello, Reply, WRONG_SECRET};
use crate::transport::fabric::Fabric;
use crate::transport::linger::{Closing, Linger};
use crate::transport::wait::Wait;

/// Time within which a connection must prove who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Limit of unauthenticated connections; addresses share it.
const HALF_OPEN: usize = 256;
/// Limit of connections that wait for our side to ask for them.
const FILED: usize = 16 << 10;
/// Longest time for what dropped links have left when the endpoint is dropped, too.
const FINISH: Duration = Duration::from_secs(5);
/// Pause after `accept` failed, for want of descriptors for example.
const BREATHER: Duration = Duration::from_millis(100);

/// The link and the stream that a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) comm: u32,
    /// The ends of the link. Its target is we, or a rank that we relay to.
    pub(super) origin: u32,
    pub(super) target: u32,
    pub(super) channel: u32,
    pub(super) stream: usize,
}

impl Key {
    pub(super) fn of(hello: &Hello) -> Key {
        let Hello { comm, origin, target, channel, .. } = *hello;
        Key { comm, origin, target, channel, stream: hello.stream() }
    }
}

/// A connection, and the index of the fabric that it came over.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) fabric: usize,
    pub(super) conn: Box<dyn Conn>,
}

type Filed = HashMap<Key, VecDeque<(Hello, Incoming)>>;

/// State shared by the acceptor and the connecting threads.
#[derive(Debug)]
pub(super) struct Backlog {
    filed: Mutex<Filed>,
    arrived: Condvar,
    stop: AtomicBool,
    bell: Arc<Doorbell>,
    pub(super) linger: Arc<Linger>,
}

impl Backlog {
    pub(super) fn new() -> Result<Arc<Backlog>> {
        let bell = Doorbell::new()?;
        let linger = Linger::new(bell.clone());
        let (filed, arrived, stop) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        Ok(Arc::new(Backlog { filed, arrived, stop, bell, linger }))
    }

    /// The next connection for `key` whose dialer is still there.
    pub(super) fn take(&self, key: &Key, wait: &Wait<'_>, detail: impl Fn() -> String) -> Result<(Hello, Incoming)> {
        let mut filed = lock(&self.filed);
        loop {
            if let Some(queue) = filed.get_mut(key) {
                while let Some((hello, incoming)) = queue.pop_front() {
                    if !incoming.conn.is_gone() {
                        return Ok((hello, incoming));
                    }
                    log::debug!("the connection of rank {} from {} went away", hello.from, incoming.conn.address());
                }
                filed.remove(key);
            }
            let slice = wait.slice(&detail)?;
            filed = self.arrived.wait_timeout(filed, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn file(&self, hello: Hello, mut incoming: Incoming) {
        let key = Key::of(&hello);
        let mut filed = lock(&self.filed);
        if filed.values().map(VecDeque::len).sum::<usize>() >= FILED {
            log::warn!("{FILED} connections wait to be asked for: turning away {}", incoming.conn.address());
            let _ = incoming.conn.reply(&Reply::Stranger("too many connections wait".to_owned()));
            return;
        }
        filed.entry(key).or_default().push_back((hello, incoming));
        self.arrived.notify_all();
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// Starts the thread for an endpoint.
pub(super) fn start(inner: &Arc<Inner>) -> Result<Thread> {
    let (rank, secret, fabrics, backlog) = (inner.rank, inner.secret, inner.fabrics.clone(), inner.backlog.clone());
    let (endpoint, half_open) = (Arc::downgrade(inner), VecDeque::new());
    let strangers = Strangers::new(format!("rank {rank}: connections turned away:"));
    let acceptor = Acceptor { rank, secret, fabrics, backlog, endpoint, half_open, strangers };
    let what = format!("the acceptor thread of rank {rank}");
    Thread::start("listen", "tinynccl-accept".to_owned(), what, move || acceptor.run())
}

/// Finishes the work of dropped links that would be lost with this process, for a bounded time.
fn finish(mut closing: Vec<Box<dyn Closing>>) {
    let until = Instant::now() + FINISH;
    closing.retain(|c| c.needs_this_process());
    loop {
        closing.retain_mut(|c| !c.is_done());
        let left = until.saturating_duration_since(Instant::now());
        if closing.is_empty() || left.is_zero() {
            return;
        }
        let mut fds: Vec<PollFd<'_>> =
            closing.iter().map(|c| PollFd::from_borrowed_fd(c.fd(), PollFlags::IN)).collect();
        if poll(&mut fds, left).is_err() {
            return;
        }
    }
}

struct Acceptor {
    rank: usize,
    secret: Secret,
    fabrics: Arc<[Box<dyn Fabric>]>,
    backlog: Arc<Backlog>,
    /// Takes what is to be relayed.
    endpoint: Weak<Inner>,
    half_open: VecDeque<HalfOpen>,
    strangers: Strangers,
}

/// An unauthenticated connection.
struct HalfOpen {
    incoming: Incoming,
    source: Source,
    deadline: Instant,
    /// The dialer's hello and our challenge; `None` before the hello has come.
    asked: Option<(Hello, Challenge)>,
}

impl Acceptor {
    fn run(mut self) {
        let mut closing: Vec<Box<dyn Closing>> = Vec::new();
        let mut breather = false;
        while !self.backlog.stop.load(Ordering::Acquire) {
            let mut fds = vec![PollFd::new(&self.backlog.bell, PollFlags::IN)];
            if !breather {
                let listeners = self.fabrics.iter().flat_map(|fabric| fabric.listeners());
                fds.extend(listeners.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            }
            fds.extend(self.half_open.iter().map(|h| PollFd::from_borrowed_fd(h.incoming.conn.fd(), PollFlags::IN)));
            fds.extend(closing.iter().map(|c| PollFd::from_borrowed_fd(c.fd(), PollFlags::IN)));
            let time = match (breather, self.half_open.is_empty() && closing.is_empty()) {
                (true, _) => BREATHER,
                (false, true) => Duration::from_secs(3600),
                (false, false) => Duration::from_millis(500),
            };
            let due = self.strangers.due().map(|due| due.saturating_duration_since(Instant::now()));
            if let Err(e) = poll(&mut fds, due.map_or(time, |due| due.min(time))) {
                log::error!("rank {}: the acceptor cannot poll: {e}", self.rank);
                std::thread::sleep(BREATHER);
            }
            drop(fds);
            self.backlog.bell.drain();
            breather = !self.accept_all();
            self.read_all();
            self.strangers.tick();
            self.fabrics.iter().for_each(|fabric| fabric.handle_events());
            closing.extend(self.backlog.linger.collect());
            closing.retain_mut(|c| !c.is_done());
        }
        closing.extend(self.backlog.linger.stop());
        finish(closing);
    }

    /// Takes all connections that wait; false when that failed.
    fn accept_all(&mut self) -> bool {
        let deadline = Instant::now() + HANDSHAKE;
        let mut ok = true;
        for (index, fabric) in self.fabrics.iter().enumerate() {
            for _ in 0..HALF_OPEN {
                match fabric.incoming() {
                    Ok(Some(conn)) => {
                        let source = Source::from(conn.address().as_str());
                        let incoming = Incoming { fabric: index, conn };
                        self.half_open.push_back(HalfOpen { incoming, source, deadline, asked: None });
                    }
                    Ok(None) => break,
                    Err(e) => {
                        log::error!("rank {}: cannot accept a connection: {e}", self.rank);
                        ok = false;
                        break;
                    }
                }
            }
        }
        ok
    }

    /// Reads from all unauthenticated connections.
    fn read_all(&mut self) {
        let now = Instant::now();
        let crowd = self.half_open.iter().map(|half| (half.source, half.asked.is_some()));
        let excess = half_open::excess(crowd, HALF_OPEN);
        for (i, mut half) in std::mem::take(&mut self.half_open).into_iter().enumerate() {
            let read = match half.asked {
                None => self.read_hello(&mut half),
                Some((hello, challenge)) => {
                    let mut proof = [0; size_of::<Proof>()];
                    match half.incoming.conn.read(&mut proof) {
                        Ok(true) if challenge.is_met(&hello, &self.secret, &proof) => {
                            self.admit(hello, half.incoming);
                            continue;
                        }
                        Ok(true) => Err((WRONG_SECRET.to_owned(), true)),
                        Ok(false) => Ok(()),
                        Err(e) => Err((format!("{e}, where its proof was expected"), false)),
                    }
                }
            };
            match read {
                Ok(()) if excess.contains(&i) => {
                    self.turn_away(half, "too many connections at once that prove nothing", false)
                }
                Ok(()) if now >= half.deadline => self.turn_away(half, "it has not proven who it is in time", false),
                Ok(()) => self.half_open.push_back(half),
                Err((reason, answer)) => self.turn_away(half, &reason, answer),
            }
        }
    }

    /// Reads a hello, if it is there, and asks for a proof. An error comes with true if the dialer is to get it as a
    /// reply.
    fn read_hello(&self, half: &mut HalfOpen) -> Result<(), (String, bool)> {
        let mut bytes = [0; Hello::BYTES];
        if !half.incoming.conn.read(&mut bytes).map_err(|e| (e, false))? {
            return Ok(());
        }
        let hello = Hello::parse(&bytes, self.rank).map_err(|reason| match reason {
            Some(reason) => (reason, true),
            None => ("it does not speak our protocol".to_owned(), false),
        })?;
        let challenge = Challenge::to(&hello, &self.secret).map_err(|e| (e.to_string(), false))?;
        half.incoming.conn.reply(&Reply::Prove(challenge)).map_err(|e| (e, false))?;
        half.asked = Some((hello, challenge));
        Ok(())
    }

    /// Takes an authenticated connection: relays the link, or files the connection until it is asked for.
    fn admit(&self, hello: Hello, incoming: Incoming) {
        // Of several streams the first asks for the link.
        if hello.target as usize != self.rank && hello.stream() == 0 {
            if let Some(endpoint) = self.endpoint.upgrade() {
                hop::take(&endpoint, hello, incoming);
            }
        } else {
            self.backlog.file(hello, incoming);
        }
    }

    fn turn_away(&mut self, mut half: HalfOpen, reason: &str, answer: bool) {
        self.strangers.note(format!("{}: {reason}", half.incoming.conn.address()));
        if answer {
            let _ = half.incoming.conn.reply(&Reply::Stranger(reason.to_owned()));
        }
    }
}
