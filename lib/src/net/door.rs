//! The acceptor of a process: one port for all listeners, and the thread that shakes hands there.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::ends::{self, Receiver};
use super::handle::Handle;
use super::link::{Link, Ways};
use super::relay::{self, Stops};
use super::{Inner, ports};
use crate::doorbell::Doorbell;
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::secret::{self, Proof, Secret};
use crate::strangers::Strangers;
use crate::threads::{Thread, lock, poll};
use crate::transport::conn::Conn;
use crate::transport::handshake::{Challenge, Hello, Reply, WRONG_SECRET};
use crate::transport::stream::StreamConn;
use crate::transport::tcp::{Port, incoming};

/// Rank of the accepting end in a hello, as there are no ranks here.
pub(super) const ACCEPTOR: usize = 0;
/// Rank of the dialing end in a hello.
pub(super) const DIALER: usize = 1;
/// Longest error text of a peer that has no path here, in bytes.
const NEWS: usize = 16 << 10;
/// Longest time that a connection may take to authenticate.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Most connections at once that have not named a listener; the oldest is rejected when there are more.
const HALF_OPEN: usize = 256;
/// Most connections at once that have named a listener and are being authenticated: hundreds of ranks may dial at once.
const PROVING: usize = 1024;
/// Pause after `accept` failed, for lack of descriptors for example.
const BREATHER: Duration = Duration::from_millis(100);

/// A listener as the acceptor thread sees it.
#[derive(Debug)]
struct Waiting {
    secret: Secret,
    ready: VecDeque<Result<Receiver>>,
}

#[derive(Debug)]
struct Shared {
    listeners: Mutex<HashMap<u32, Waiting>>,
    next: AtomicU32,
    stop: AtomicBool,
    bell: Arc<Doorbell>,
    ports: (u16, u16),
}

/// The acceptor thread, and the state that it shares with listeners.
#[derive(Debug)]
pub(super) struct Door {
    shared: Arc<Shared>,
    thread: Thread,
}

impl Door {
    pub(super) fn open(inner: &Arc<Inner>) -> Result<Door> {
        let bind = |any: IpAddr| Port::bind(any, inner.config.port_range, &inner.sockets);
        let is_there = |v6: bool| inner.ports.iter().any(|p| p.ip.is_ipv6() == v6);
        let v4 = is_there(false).then(|| bind(Ipv4Addr::UNSPECIFIED.into())).transpose()?;
        let v6 = match is_there(true).then(|| bind(Ipv6Addr::UNSPECIFIED.into())) {
            Some(Err(e)) if v4.is_some() => {
                log::warn!("net: without IPv6: {e}");
                None
            }
            other => other.transpose()?,
        };
        let port = |port: &Option<Port>| port.as_ref().map_or(0, |p| p.addr.port());
        let shared = Arc::new(Shared {
            listeners: Mutex::default(),
            next: AtomicU32::new(relay::LISTENER + 1),
            stop: AtomicBool::new(false),
            bell: Doorbell::new()?,
            ports: (port(&v4), port(&v6)),
        });
        inner.relays.nodes.introduce(shared.ports, &inner.ports);
        let acceptor = Acceptor {
            inner: inner.clone(),
            shared: shared.clone(),
            ports: v4.into_iter().chain(v6).collect(),
            half_open: VecDeque::new(),
            partial: HashMap::new(),
            links: HashMap::new(),
            strangers: Strangers::new("net: connections turned away:".to_owned()),
        };
        let what = "the acceptor thread of the network".to_owned();
        let thread = Thread::start("net", "tinynccl-door".to_owned(), what, move || acceptor.run())?;
        Ok(Door { shared, thread })
    }

    pub(super) fn listen(&self, inner: &Inner) -> Result<(Handle, Listener)> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let handle = Handle::new(secret::random()?, inner.host, id, self.shared.ports, (&inner.ports, &inner.others));
        let waiting = Waiting { secret: handle.key(), ready: VecDeque::new() };
        lock(&self.shared.listeners).insert(id, waiting);
        let (ports, limit) = (ports::list(&inner.ports), inner.config.connect_timeout);
        Ok((
            handle,
            Listener { origin: Origin::here(), shared: self.shared.clone(), id, ports, limit, asked: Mutex::default() },
        ))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if !self.thread.is_here() {
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        self.thread.join();
    }
}

/// Accepts the connections to a handle.
#[derive(Debug)]
pub struct Listener {
    origin: Origin,
    shared: Arc<Shared>,
    id: u32,
    ports: String,
    limit: Duration,
    /// Time of the first [`Listener::accept`] since the last connection was taken; `None` before it.
    asked: Mutex<Option<Instant>>,
}

impl Listener {
    /// The next connection, if it is here.
    ///
    /// # Errors
    /// [`Error::Connection`] when the peer reports that it has no path here, or none has come for
    /// [`Config::connect_timeout`](crate::Config::connect_timeout) since this was first called for it.
    pub fn accept(&self) -> Result<Option<Receiver>> {
        if !self.origin.is_here() {
            return Err(super::elsewhere("accept"));
        }
        let mut asked = lock(&self.asked);
        let mut listeners = lock(&self.shared.listeners);
        let ready = listeners.get_mut(&self.id).and_then(|w| w.ready.pop_front());
        if let Some(ready) = ready {
            *asked = None;
            return ready.map(Some);
        }
        if asked.get_or_insert_with(Instant::now).elapsed() < self.limit {
            return Ok(None);
        }
        Err(Error::Connection {
            op: "accept".to_owned(),
            connection: format!("ports here: {}", self.ports),
            detail: format!(
                "no peer connected within {:?} (TINYNCCL_CONNECT_TIMEOUT): look at the output of the rank that should have, and \
                 whether its networks lead to one of these ports",
                self.limit
            ),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        let gone = lock(&self.shared.listeners).remove(&self.id);
        // Connections that were never taken are closed without the lock.
        drop(gone);
    }
}

/// An unauthenticated connection, or one that is no link yet.
struct HalfOpen {
    stage: Stage,
    deadline: Instant,
}

enum Stage {
    Hello(StreamConn<TcpStream>),
    Proof(StreamConn<TcpStream>, Hello, Secret, Challenge),
    /// The peer requests that its stream be relayed, and sends the rest of the path.
    Relay(StreamConn<TcpStream>),
    /// The peer sends the path that its relayed stream took.
    Relayed(StreamConn<TcpStream>, Hello, Secret),
    /// The peer sends the listener the error for which there will be no link.
    News(TcpStream, u32, Vec<u8>),
}

impl Stage {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stage::Hello(conn) | Stage::Proof(conn, ..) | Stage::Relay(conn) | Stage::Relayed(conn, ..) => conn.fd(),
            Stage::News(socket, ..) => socket.as_fd(),
        }
    }

    fn address(&self) -> String {
        match self {
            Stage::Hello(conn) | Stage::Proof(conn, ..) | Stage::Relay(conn) | Stage::Relayed(conn, ..) => {
                conn.address()
            }
            Stage::News(socket, ..) => socket.peer_addr().map_or("?".to_owned(), |a| a.to_string()),
        }
    }
}

/// Reads the acceptors that a peer names; `None` until they are here.
fn read_stops(conn: &mut StreamConn<TcpStream>) -> std::result::Result<Option<Vec<SocketAddr>>, String> {
    let mut bytes = [0; Stops::BYTES];
    if conn.read(&mut bytes)? { Stops::parse(&bytes).map(Some) } else { Ok(None) }
}

/// Streams of a new link of which some are still to come.
struct Partial {
    /// The sender and the relays, if it comes through some.
    way: Vec<SocketAddr>,
    sockets: Vec<Option<TcpStream>>,
    deadline: Instant,
}

/// Outcome of reading from a connection that is no link yet.
enum Next {
    Stay(Stage),
    Done,
    /// Rejected: the reason, and the connection if that is to be sent.
    Stranger(String, Option<StreamConn<TcpStream>>),
}

struct Acceptor {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    ports: Vec<Port>,
    half_open: VecDeque<HalfOpen>,
    partial: HashMap<(u32, u32), Partial>,
    /// Links with several rails, which may get more streams after their listener is gone.
    links: HashMap<(u32, u32), (Secret, Weak<Link>)>,
    strangers: Strangers,
}

impl Acceptor {
    fn run(mut self) {
        let mut breather = false;
        while !self.shared.stop.load(Ordering::Acquire) {
            let mut fds = vec![PollFd::new(&self.shared.bell, PollFlags::IN)];
            if !breather {
                fds.extend(self.ports.iter().map(|port| PollFd::new(port, PollFlags::IN)));
            }
            fds.extend(self.inner.relays.nodes.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            fds.extend(self.half_open.iter().map(|h| PollFd::from_borrowed_fd(h.stage.fd(), PollFlags::IN)));
            let idle = self.half_open.is_empty() && self.partial.is_empty();
            let time = match (breather, idle) {
                (true, _) => BREATHER,
                (false, true) => Duration::from_secs(3600),
                (false, false) => Duration::from_millis(500),
            };
            let due = self.strangers.due().map(|due| due.saturating_duration_since(Instant::now()));
            if let Err(e) = poll(&mut fds, due.map_or(time, |due| due.min(time))) {
                log::error!("net: the acceptor cannot poll: {}", std::io::Error::from(e));
                std::thread::sleep(BREATHER);
            }
            drop(fds);
            self.shared.bell.drain();
            self.inner.relays.nodes.hear();
            breather = !self.accept_all();
            self.read_all();
            self.strangers.tick();
            let now = Instant::now();
            self.partial.retain(|_, partial| now < partial.deadline);
        }
    }

    /// Accepts all connections that wait; false when that failed.
    fn accept_all(&mut self) -> bool {
        let deadline = Instant::now() + HANDSHAKE;
        for port in &self.ports {
            for _ in 0..HALF_OPEN {
                match incoming(port) {
                    Ok(Some(conn)) => self.half_open.push_back(HalfOpen { stage: Stage::Hello(conn), deadline }),
                    Ok(None) => break,
                    Err(e) => {
                        log::error!("net: cannot accept a connection: {e}");
                        return false;
                    }
                }
            }
        }
        true
    }

    fn read_all(&mut self) {
        let now = Instant::now();
        let kind = |stage: &Stage| usize::from(!matches!(stage, Stage::Hello(_)));
        // Connections of either kind; the oldest are rejected while there are more than may stay.
        let mut there = [0, 0];
        self.half_open.iter().for_each(|half| there[kind(&half.stage)] += 1);
        for HalfOpen { stage, deadline } in std::mem::take(&mut self.half_open) {
            let address = stage.address();
            let next = match self.advance(stage) {
                Next::Stay(ref stage) if there[kind(stage)] > [HALF_OPEN, PROVING][kind(stage)] => {
                    there[kind(stage)] -= 1;
                    Next::Stranger("too many connections at once that prove nothing".to_owned(), None)
                }
                Next::Stay(_) if now >= deadline => {
                    Next::Stranger("it has not proven who it is in time".to_owned(), None)
                }
                other => other,
            };
            match next {
                Next::Stay(stage) => self.half_open.push_back(HalfOpen { stage, deadline }),
                Next::Done => {}
                Next::Stranger(why, conn) => {
                    self.strangers.note(format!("{address}: {why}"));
                    if let Some(mut conn) = conn {
                        // It has gone, or receives it.
                        let _ = conn.write(&Reply::Stranger(why).to_bytes());
                    }
                }
            }
        }
    }

    fn advance(&mut self, stage: Stage) -> Next {
        match stage {
            Stage::Hello(conn) => self.hello(conn),
            Stage::Proof(mut conn, hello, secret, challenge) => {
                let mut proof = [0; size_of::<Proof>()];
                match conn.read(&mut proof) {
                    Ok(true) if challenge.is_met(&hello, &secret, &proof) => self.admit(conn, &hello, secret),
                    Ok(true) => Next::Stranger(WRONG_SECRET.to_owned(), Some(conn)),
                    Ok(false) => Next::Stay(Stage::Proof(conn, hello, secret, challenge)),
                    Err(e) => Next::Stranger(format!("{e}, where its proof was expected"), None),
                }
            }
            Stage::Relay(mut conn) => match read_stops(&mut conn) {
                Ok(Some(doors)) => {
                    relay::take(&self.inner, conn, doors);
                    Next::Done
                }
                Ok(None) => Next::Stay(Stage::Relay(conn)),
                Err(why) => Next::Stranger(why, None),
            },
            Stage::Relayed(mut conn, hello, secret) => match read_stops(&mut conn) {
                Ok(Some(way)) => self.place(conn.into_inner(), &hello, secret, way),
                Ok(None) => Next::Stay(Stage::Relayed(conn, hello, secret)),
                Err(why) => Next::Stranger(why, None),
            },
            Stage::News(socket, listener, text) => self.news(socket, listener, text),
        }
    }

    fn hello(&self, mut conn: StreamConn<TcpStream>) -> Next {
        let mut bytes = [0; Hello::BYTES];
        match conn.read(&mut bytes) {
            Ok(true) => {}
            Ok(false) => return Next::Stay(Stage::Hello(conn)),
            Err(e) => return Next::Stranger(e, None),
        }
        let hello = match Hello::parse(&bytes, ACCEPTOR) {
            Ok(hello) => hello,
            Err(Some(reason)) => return Next::Stranger(reason, Some(conn)),
            Err(None) => return Next::Stranger("it does not speak our protocol".to_owned(), None),
        };
        let listener = match hello.comm {
            relay::LISTENER => (self.inner.config.net_relay_port > 0).then_some(self.inner.relays.key),
            comm => lock(&self.shared.listeners).get(&comm).map(|w| w.secret),
        };
        let known = || self.links.get(&(hello.comm, hello.channel)).map(|(secret, _)| *secret);
        let Some(secret) = listener.or_else(known) else {
            return Next::Stranger("nobody listens for it any more".to_owned(), Some(conn));
        };
        let asked = Challenge::to(&hello, &secret).map_err(|e| e.to_string());
        match asked.and_then(|challenge| conn.write(&Reply::Prove(challenge).to_bytes()).map(|()| challenge)) {
            Ok(challenge) => Next::Stay(Stage::Proof(conn, hello, secret, challenge)),
            Err(e) => Next::Stranger(e, None),
        }
    }

    /// Takes in an authenticated connection: its peer has the handle, or requests a relay.
    fn admit(&mut self, mut conn: StreamConn<TcpStream>, hello: &Hello, secret: Secret) -> Next {
        if hello.comm == relay::LISTENER {
            return match conn.write(&Reply::Welcome.to_bytes()) {
                Ok(()) => Next::Stay(Stage::Relay(conn)),
                Err(e) => Next::Stranger(e, None),
            };
        }
        let (streams, stream) = (hello.streams(), hello.stream());
        let key = (hello.comm, hello.channel);
        let known = self.links.get(&key);
        if let Some((_, link)) = known {
            let why = match link.upgrade().filter(|link| !link.is_over()) {
                None => Some("its connection is closed".to_owned()),
                Some(link) => (!link.is_free(stream)).then(|| format!("the place of stream {stream} is not free yet")),
            };
            if let Some(why) = why {
                return Next::Stranger(why, Some(conn));
            }
        }
        let (ours, theirs) = (self.inner.config.net_window, hello.options().max_message);
        let wrong = if ours != theirs {
            Some(format!("TINYNCCL_NET_WINDOW is {ours} at one end and {theirs} at the other: set it alike everywhere"))
        } else if streams > 0 && stream >= streams && known.is_none() || streams > crate::config::MAX_STREAMS {
            Some(format!("expected at most {} streams, got stream {stream} of {streams}", crate::config::MAX_STREAMS))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            self.deliver(hello.comm, Err(self.failed(&conn.address(), &wrong)));
            // It has gone, or receives it.
            let _ = conn.write(&Reply::Refused(wrong).to_bytes());
            return Next::Done;
        }
        if let Err(e) = conn.write(&Reply::Welcome.to_bytes()) {
            return Next::Stranger(e, None);
        }
        if streams == 0 {
            return Next::Stay(Stage::News(conn.into_inner(), hello.comm, Vec::new()));
        }
        if hello.origin as usize != DIALER {
            return Next::Stay(Stage::Relayed(conn, *hello, secret));
        }
        self.place(conn.into_inner(), hello, secret, Vec::new())
    }

    /// Takes in a stream that came `way`: of a link that stands, in the position of a lost one, or of a new link.
    fn place(&mut self, socket: TcpStream, hello: &Hello, secret: Secret, way: Vec<SocketAddr>) -> Next {
        let Some((_, link)) = self.links.get(&(hello.comm, hello.channel)) else {
            return self.take(socket, hello, secret, way);
        };
        if let Some(link) = link.upgrade() {
            let added = link.add(hello.stream(), socket, &self.inner.workers);
            let how = if added { "is new" } else { "is too late" };
            log::info!("net: {}: stream {} {how}", link.name(), hello.stream());
        }
        Next::Done
    }

    /// Takes in a stream of a new link, which is delivered to its listener once it has all.
    fn take(&mut self, socket: TcpStream, hello: &Hello, secret: Secret, way: Vec<SocketAddr>) -> Next {
        let (streams, stream, key) = (hello.streams(), hello.stream(), (hello.comm, hello.channel));
        let deadline = Instant::now() + self.inner.config.connect_timeout;
        let partial =
            self.partial.entry(key).or_insert_with(|| Partial { way: Vec::new(), sockets: Vec::new(), deadline });
        relay::note(&mut partial.way, &way);
        partial.sockets.resize_with(streams.max(partial.sockets.len()), || None);
        if let Some(place) = partial.sockets.get_mut(stream) {
            *place = Some(socket);
        }
        if partial.sockets.iter().all(Option::is_some)
            && let Some(whole) = self.partial.remove(&key)
        {
            let sockets: Vec<TcpStream> = whole.sockets.into_iter().flatten().collect();
            let ways = Ways { several: hello.options().depth > 1, relayed: !whole.way.is_empty() };
            let made = self.receiver(sockets, ways, &whole.way).and_then(|made| {
                if made.link.several() {
                    self.links.retain(|_, (_, link)| link.strong_count() > 0);
                    self.links.insert(key, (secret, Arc::downgrade(&made.link)));
                    self.inner.rails.watch(&self.inner, &made.link, None)?;
                }
                Ok(made)
            });
            self.deliver(hello.comm, made);
        }
        Next::Done
    }

    fn receiver(&self, sockets: Vec<TcpStream>, ways: Ways, way: &[SocketAddr]) -> Result<Receiver> {
        let name = super::dial::name(&sockets, way);
        log::info!("accepted {name}");
        ends::receiver(name, (sockets, ways), &self.inner)
    }

    /// Reads the error of a peer that has no path here, and delivers it to the listener.
    fn news(&self, mut socket: TcpStream, listener: u32, mut text: Vec<u8>) -> Next {
        let mut bytes = [0; 1024];
        loop {
            match socket.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) if text.len() + n <= NEWS => text.extend(bytes.iter().take(n)),
                Ok(_) => break,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Next::Stay(Stage::News(socket, listener, text)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let from = socket.peer_addr().map_or("?".to_owned(), |a| a.to_string());
        self.deliver(listener, Err(self.failed(&from, &String::from_utf8_lossy(&text))));
        Next::Done
    }

    fn failed(&self, from: &str, detail: &str) -> Error {
        let connection = format!("from {from} to ports {}", ports::list(&self.inner.ports));
        Error::Connection { op: "accept".to_owned(), connection, detail: detail.to_owned() }
    }

    fn deliver(&self, listener: u32, made: Result<Receiver>) {
        // Closed meanwhile: the connection goes, without the lock.
        let late = match lock(&self.shared.listeners).get_mut(&listener) {
            Some(waiting) => {
                waiting.ready.push_back(made);
                None
            }
            None => Some(made),
        };
        drop(late);
    }
}
