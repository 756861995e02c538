//! The acceptor of a process: one port for all listeners, and the thread that shakes hands there.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::doorbell::Doorbell;
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::net::address::handle::Handle;
use crate::net::address::{ACCEPTOR, DIALER, ports};
use crate::net::connect::Context;
use crate::net::connection::Connection;
use crate::net::connection::ends::{self, Receiver};
use crate::net::data::request::wrong_process;
use crate::net::data::session::Paths;
use crate::net::relay::{self, SourceRoute};
use crate::secret::{self, Proof, Secret};
use crate::strangers::Strangers;
use crate::threads::{Thread, lock, poll};
use crate::transport::conn::Conn;
use crate::transport::handshake::{Challenge, Hello, Reply, WRONG_SECRET};
use crate::transport::stream::StreamConn;
use crate::transport::tcp::{Port, incoming};

/// Longest error text of a peer that has no path here, in bytes.
const MAX_ERROR_TEXT: usize = 16 << 10;
/// Longest time that a connection may take to authenticate.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Most connections at once that have not named a listener; the oldest is rejected when there are more.
const MAX_UNAUTHENTICATED: usize = 256;
/// Most connections at once that have named a listener and are being authenticated: hundreds of ranks may dial at once.
const MAX_AUTHENTICATING: usize = 1024;
/// Pause after `accept` failed, for lack of descriptors for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
pub(in crate::net) struct Acceptor {
    shared: Arc<Shared>,
    thread: Thread,
}

impl Acceptor {
    pub(in crate::net) fn open(inner: &Arc<Context>) -> Result<Acceptor> {
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
        inner.relays.nodes.announce(shared.ports, &inner.ports);
        let acceptor = AcceptThread {
            inner: inner.clone(),
            shared: shared.clone(),
            ports: v4.into_iter().chain(v6).collect(),
            unauthenticated: VecDeque::new(),
            partial: HashMap::new(),
            connections: HashMap::new(),
            rejections: Strangers::new("net: rejected connections:".to_owned()),
        };
        let what = "the acceptor thread of the network".to_owned();
        let thread = Thread::start("net", "tinynccl-accept".to_owned(), what, move || acceptor.run())?;
        Ok(Acceptor { shared, thread })
    }

    pub(in crate::net) fn listen(&self, inner: &Context) -> Result<(Handle, Listener)> {
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

impl Drop for Acceptor {
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
            return Err(wrong_process("accept"));
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

/// An unauthenticated connection, or one that is no connection yet.
struct Unauthenticated {
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
    /// The peer sends the listener the error for which there will be no connection.
    PeerError(TcpStream, u32, Vec<u8>),
}

impl Stage {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stage::Hello(conn) | Stage::Proof(conn, ..) | Stage::Relay(conn) | Stage::Relayed(conn, ..) => conn.fd(),
            Stage::PeerError(socket, ..) => socket.as_fd(),
        }
    }

    fn address(&self) -> String {
        match self {
            Stage::Hello(conn) | Stage::Proof(conn, ..) | Stage::Relay(conn) | Stage::Relayed(conn, ..) => {
                conn.address()
            }
            Stage::PeerError(socket, ..) => socket.peer_addr().map_or("?".to_owned(), |a| a.to_string()),
        }
    }
}

/// Reads the acceptors that a peer names; `None` until they are here.
fn read_source_route(conn: &mut StreamConn<TcpStream>) -> std::result::Result<Option<Vec<SocketAddr>>, String> {
    let mut bytes = [0; SourceRoute::BYTES];
    if conn.read(&mut bytes)? { SourceRoute::parse(&bytes).map(Some) } else { Ok(None) }
}

/// Streams of a new connection of which some are still to come.
struct Partial {
    /// The sender and the relays, if it comes through some.
    route: Vec<SocketAddr>,
    sockets: Vec<Option<TcpStream>>,
    deadline: Instant,
}

/// Outcome of reading from a connection that is no connection yet.
enum Next {
    Stay(Stage),
    Done,
    /// Rejected: the reason, and the connection if that is to be sent.
    Reject(String, Option<StreamConn<TcpStream>>),
}

struct AcceptThread {
    inner: Arc<Context>,
    shared: Arc<Shared>,
    ports: Vec<Port>,
    unauthenticated: VecDeque<Unauthenticated>,
    partial: HashMap<(u32, u32), Partial>,
    /// Connections with several rails, which may get more streams after their listener is gone.
    connections: HashMap<(u32, u32), (Secret, Weak<Connection>)>,
    rejections: Strangers,
}

impl AcceptThread {
    fn run(mut self) {
        let mut paused = false;
        while !self.shared.stop.load(Ordering::Acquire) {
            let mut fds = vec![PollFd::new(&self.shared.bell, PollFlags::IN)];
            if !paused {
                fds.extend(self.ports.iter().map(|port| PollFd::new(port, PollFlags::IN)));
            }
            fds.extend(self.inner.relays.nodes.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            fds.extend(self.unauthenticated.iter().map(|h| PollFd::from_borrowed_fd(h.stage.fd(), PollFlags::IN)));
            let idle = self.unauthenticated.is_empty() && self.partial.is_empty();
            let time = match (paused, idle) {
                (true, _) => ACCEPT_PAUSE,
                (false, true) => Duration::from_secs(3600),
                (false, false) => Duration::from_millis(500),
            };
            let due = self.rejections.due().map(|due| due.saturating_duration_since(Instant::now()));
            if let Err(e) = poll(&mut fds, due.map_or(time, |due| due.min(time))) {
                log::error!("net: the acceptor cannot poll: {}", std::io::Error::from(e));
                std::thread::sleep(ACCEPT_PAUSE);
            }
            drop(fds);
            self.shared.bell.drain();
            self.inner.relays.nodes.handle_datagrams();
            paused = !self.accept_all();
            self.read_all();
            self.rejections.tick();
            let now = Instant::now();
            self.partial.retain(|_, partial| now < partial.deadline);
        }
    }

    /// Accepts all connections that wait; false when that failed.
    fn accept_all(&mut self) -> bool {
        let deadline = Instant::now() + HANDSHAKE;
        for port in &self.ports {
            for _ in 0..MAX_UNAUTHENTICATED {
                match incoming(port) {
                    Ok(Some(conn)) => {
                        self.unauthenticated.push_back(Unauthenticated { stage: Stage::Hello(conn), deadline })
                    }
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
        self.unauthenticated.iter().for_each(|half| there[kind(&half.stage)] += 1);
        for Unauthenticated { stage, deadline } in std::mem::take(&mut self.unauthenticated) {
            let address = stage.address();
            let next = match self.advance(stage) {
                Next::Stay(ref stage)
                    if there[kind(stage)] > [MAX_UNAUTHENTICATED, MAX_AUTHENTICATING][kind(stage)] =>
                {
                    there[kind(stage)] -= 1;
                    Next::Reject("too many unauthenticated connections".to_owned(), None)
                }
                Next::Stay(_) if now >= deadline => Next::Reject("the handshake timed out".to_owned(), None),
                other => other,
            };
            match next {
                Next::Stay(stage) => self.unauthenticated.push_back(Unauthenticated { stage, deadline }),
                Next::Done => {}
                Next::Reject(why, conn) => {
                    self.rejections.note(format!("{address}: {why}"));
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
                    Ok(true) => Next::Reject(WRONG_SECRET.to_owned(), Some(conn)),
                    Ok(false) => Next::Stay(Stage::Proof(conn, hello, secret, challenge)),
                    Err(e) => Next::Reject(format!("{e}, where its proof was expected"), None),
                }
            }
            Stage::Relay(mut conn) => match read_source_route(&mut conn) {
                Ok(Some(acceptors)) => {
                    relay::start(&self.inner.relays, conn, acceptors);
                    Next::Done
                }
                Ok(None) => Next::Stay(Stage::Relay(conn)),
                Err(why) => Next::Reject(why, None),
            },
            Stage::Relayed(mut conn, hello, secret) => match read_source_route(&mut conn) {
                Ok(Some(route)) => self.add_stream(conn.into_inner(), &hello, secret, route),
                Ok(None) => Next::Stay(Stage::Relayed(conn, hello, secret)),
                Err(why) => Next::Reject(why, None),
            },
            Stage::PeerError(socket, listener, text) => self.read_error(socket, listener, text),
        }
    }

    fn hello(&self, mut conn: StreamConn<TcpStream>) -> Next {
        let mut bytes = [0; Hello::BYTES];
        match conn.read(&mut bytes) {
            Ok(true) => {}
            Ok(false) => return Next::Stay(Stage::Hello(conn)),
            Err(e) => return Next::Reject(e, None),
        }
        let hello = match Hello::parse(&bytes, ACCEPTOR) {
            Ok(hello) => hello,
            Err(Some(reason)) => return Next::Reject(reason, Some(conn)),
            Err(None) => return Next::Reject("not the handshake of this library".to_owned(), None),
        };
        let listener = match hello.comm {
            relay::LISTENER => (self.inner.config.net_relay_port > 0).then_some(self.inner.relays.key),
            comm => lock(&self.shared.listeners).get(&comm).map(|w| w.secret),
        };
        let known = || self.connections.get(&(hello.comm, hello.channel)).map(|(secret, _)| *secret);
        let Some(secret) = listener.or_else(known) else {
            return Next::Reject("no such listener".to_owned(), Some(conn));
        };
        let asked = Challenge::to(&hello, &secret).map_err(|e| e.to_string());
        match asked.and_then(|challenge| conn.write(&Reply::Prove(challenge).to_bytes()).map(|()| challenge)) {
            Ok(challenge) => Next::Stay(Stage::Proof(conn, hello, secret, challenge)),
            Err(e) => Next::Reject(e, None),
        }
    }

    /// Takes in an authenticated connection: its peer has the handle, or requests a relay.
    fn admit(&mut self, mut conn: StreamConn<TcpStream>, hello: &Hello, secret: Secret) -> Next {
        if hello.comm == relay::LISTENER {
            return match conn.write(&Reply::Welcome.to_bytes()) {
                Ok(()) => Next::Stay(Stage::Relay(conn)),
                Err(e) => Next::Reject(e, None),
            };
        }
        let (streams, stream) = (hello.streams(), hello.stream());
        let key = (hello.comm, hello.channel);
        let known = self.connections.get(&key);
        if let Some((_, connection)) = known {
            let why = match connection.upgrade().filter(|connection| !connection.is_over()) {
                None => Some("its connection is closed".to_owned()),
                Some(connection) => {
                    (!connection.is_free(stream)).then(|| format!("the position of stream {stream} is not free yet"))
                }
            };
            if let Some(why) = why {
                return Next::Reject(why, Some(conn));
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
            return Next::Reject(e, None);
        }
        if streams == 0 {
            return Next::Stay(Stage::PeerError(conn.into_inner(), hello.comm, Vec::new()));
        }
        if hello.origin as usize != DIALER {
            return Next::Stay(Stage::Relayed(conn, *hello, secret));
        }
        self.add_stream(conn.into_inner(), hello, secret, Vec::new())
    }

    /// Takes in a stream that came `route`: of a connection that stands, in the position of a lost one, or of a new
    /// connection.
    fn add_stream(&mut self, socket: TcpStream, hello: &Hello, secret: Secret, route: Vec<SocketAddr>) -> Next {
        let Some((_, connection)) = self.connections.get(&(hello.comm, hello.channel)) else {
            return self.add_to_partial(socket, hello, secret, route);
        };
        if let Some(connection) = connection.upgrade() {
            let added = connection.add(hello.stream(), socket, &self.inner.workers);
            let how = if added { "is new" } else { "is too late" };
            log::info!("net: {}: stream {} {how}", connection.name(), hello.stream());
        }
        Next::Done
    }

    /// Takes in a stream of a new connection, which is delivered to its listener once it has all.
    fn add_to_partial(&mut self, socket: TcpStream, hello: &Hello, secret: Secret, route: Vec<SocketAddr>) -> Next {
        let (streams, stream, key) = (hello.streams(), hello.stream(), (hello.comm, hello.channel));
        let deadline = Instant::now() + self.inner.config.connect_timeout;
        let partial =
            self.partial.entry(key).or_insert_with(|| Partial { route: Vec::new(), sockets: Vec::new(), deadline });
        relay::add_route(&mut partial.route, &route);
        partial.sockets.resize_with(streams.max(partial.sockets.len()), || None);
        if let Some(position) = partial.sockets.get_mut(stream) {
            *position = Some(socket);
        }
        if partial.sockets.iter().all(Option::is_some)
            && let Some(whole) = self.partial.remove(&key)
        {
            let sockets: Vec<TcpStream> = whole.sockets.into_iter().flatten().collect();
            let paths = Paths { several: hello.options().depth > 1, relayed: !whole.route.is_empty() };
            let made = self.receiver(sockets, paths, &whole.route).and_then(|made| {
                if made.connection.several() {
                    self.connections.retain(|_, (_, connection)| connection.strong_count() > 0);
                    self.connections.insert(key, (secret, Arc::downgrade(&made.connection)));
                    self.inner.monitor.watch(&self.inner.config, &made.connection)?;
                }
                Ok(made)
            });
            self.deliver(hello.comm, made);
        }
        Next::Done
    }

    fn receiver(&self, sockets: Vec<TcpStream>, paths: Paths, route: &[SocketAddr]) -> Result<Receiver> {
        let name = super::dialer::name(&sockets, route);
        log::info!("accepted {name}");
        ends::receiver(name, (sockets, paths), &self.inner.resources())
    }

    /// Reads the error of a peer that has no path here, and delivers it to the listener.
    fn read_error(&self, mut socket: TcpStream, listener: u32, mut text: Vec<u8>) -> Next {
        let mut bytes = [0; 1024];
        loop {
            match socket.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) if text.len() + n <= MAX_ERROR_TEXT => text.extend(bytes.iter().take(n)),
                Ok(_) => break,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return Next::Stay(Stage::PeerError(socket, listener, text));
                }
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
