//! The acceptor of a process: one port for all listeners, and what becomes of the connections that come there.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::acceptor::{self, Handler, Incoming, Rejected};
use crate::conn::Conn;
use crate::handshake::{Hello, Reply};
use crate::rails::address::handle::Handle;
use crate::rails::address::ports;
use crate::rails::connect::Context;
use crate::rails::connect::hello::{FailureReport, StreamHello};
use crate::rails::connection::Connection;
use crate::rails::connection::ends::{self, Receiver};
use crate::rails::data::request::wrong_process;
use crate::rails::data::session::Paths;
use crate::rails::relay::{self, RelayRequest, SourceRoute};
use crate::seal::Socket;
use crate::stream::StreamConn;
use crate::tcp::{Port, incoming};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::secret::{self, Secret};
use tinynccl_sys::threads::lock;

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
    ports: (u16, u16),
}

/// The acceptor thread, and the state that it shares with listeners.
#[derive(Debug)]
pub(in crate::rails) struct Acceptor {
    shared: Arc<Shared>,
    _thread: acceptor::Acceptor,
}

impl Acceptor {
    pub(in crate::rails) fn open(inner: &Arc<Context>) -> Result<Acceptor> {
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
            ports: (port(&v4), port(&v6)),
        });
        inner.relays.nodes.announce(shared.ports, &inner.ports);
        let accepting = Accepting {
            inner: inner.clone(),
            shared: shared.clone(),
            ports: v4.into_iter().chain(v6).collect(),
            partial: HashMap::new(),
            connections: HashMap::new(),
        };
        let _thread = acceptor::Acceptor::start("net", "net".to_owned(), Doorbell::new()?, accepting)?;
        Ok(Acceptor { shared, _thread })
    }

    pub(in crate::rails) fn listen(&self, inner: &Context) -> Result<(Handle, Listener)> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let handle = Handle::new(secret::random()?, inner.host, id, self.shared.ports, (&inner.ports, &inner.others));
        let waiting = Waiting { secret: inner.key(&handle), ready: VecDeque::new() };
        lock(&self.shared.listeners).insert(id, waiting);
        let (ports, limit) = (ports::list(&inner.ports), inner.config.connect_timeout);
        Ok((
            handle,
            Listener { origin: Origin::here(), shared: self.shared.clone(), id, ports, limit, asked: Mutex::default() },
        ))
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
    /// [`Config::connect_timeout`](tinynccl_sys::Config::connect_timeout) since this was first called for it.
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

/// Streams of a new connection of which some are still to come.
struct Partial {
    /// The sender and the relays, if it comes through some.
    route: Vec<SocketAddr>,
    sockets: Vec<Option<Socket>>,
    deadline: Instant,
}

/// Returns the socket of a connection to one of our ports, which have no others.
fn socket(conn: Box<dyn Conn>) -> Option<Socket> {
    conn.downcast::<StreamConn<Socket>>().ok().map(|conn| conn.into_inner())
}

/// State of the acceptor thread.
struct Accepting {
    inner: Arc<Context>,
    shared: Arc<Shared>,
    ports: Vec<Port>,
    partial: HashMap<(u32, u32), Partial>,
    /// Connections with several rails, which may get more streams after their listener is gone.
    connections: HashMap<(u32, u32), (Secret, Weak<Connection>)>,
}

impl Handler for Accepting {
    /// Hundreds of ranks may dial at once, each with several streams.
    const MOST: usize = 1024;

    fn fds(&self, accepting: bool) -> Vec<BorrowedFd<'_>> {
        let ports = self.ports.iter().filter(|_| accepting).map(|port| port.as_fd());
        ports.chain(self.inner.relays.nodes.fds()).collect()
    }

    fn incoming(&self) -> std::io::Result<Option<Incoming>> {
        for (listener, port) in self.ports.iter().enumerate() {
            if let Some(conn) = incoming(port)? {
                return Ok(Some(Incoming { listener, conn: Box::new(conn) }));
            }
        }
        Ok(None)
    }

    fn secret(&self, hello: &Hello) -> std::result::Result<Secret, String> {
        let (stream, report) = (hello.purpose::<StreamHello>(), hello.purpose::<FailureReport>());
        if hello.purpose::<RelayRequest>().is_some() {
            let on = self.inner.config.net_relay_port > 0;
            return if on {
                Ok(self.inner.relays.key)
            } else {
                Err("relays are off there (TINYNCCL_NET_RELAY_PORT is 0)".to_owned())
            };
        }
        let Some(listener) = stream.map(|s| s.listener).or(report.map(|r| r.listener)) else {
            return Err("expected a stream, a request for a relay, or a report".to_owned());
        };
        let known = |stream: StreamHello| self.connections.get(&stream.key()).map(|(secret, _)| *secret);
        let secret = lock(&self.shared.listeners).get(&listener).map(|w| w.secret);
        secret.or_else(|| stream.and_then(known)).ok_or_else(|| "no such listener".to_owned())
    }

    /// True if its payload is encrypted from end to end.
    fn is_plain(&self, hello: &Hello) -> bool {
        hello.purpose::<RelayRequest>().is_some()
    }

    fn admit(&mut self, hello: &Hello, incoming: Incoming, attached: &[u8]) -> std::result::Result<(), Rejected> {
        let mut conn = incoming.conn;
        if let Some(report) = hello.purpose::<FailureReport>() {
            let error = self.failed(&conn.address(), &String::from_utf8_lossy(attached));
            self.deliver(report.listener, Err(error));
            // It has gone, or receives it.
            let _ = conn.reply(&Reply::Welcome);
            return Ok(());
        }
        let route = if attached.is_empty() { Ok(Vec::new()) } else { SourceRoute::parse(attached) };
        let route = match route {
            Ok(route) => route,
            Err(why) => return Err((why, conn)),
        };
        match hello.purpose::<StreamHello>() {
            Some(stream) => self.add(&stream, conn, &route),
            None => {
                if let Some(socket) = socket(conn) {
                    relay::start(&self.inner.relays, socket.into_plain(), route);
                }
                Ok(())
            }
        }
    }

    fn tick(&mut self) -> bool {
        self.inner.relays.nodes.handle_datagrams();
        let now = Instant::now();
        self.partial.retain(|_, partial| now < partial.deadline);
        !self.partial.is_empty()
    }
}

impl Accepting {
    /// Takes in a stream that came `route`: of a connection that stands, in the position of a lost one, or of a new
    /// connection.
    fn add(
        &mut self,
        hello: &StreamHello,
        mut conn: Box<dyn Conn>,
        route: &[SocketAddr],
    ) -> std::result::Result<(), Rejected> {
        let (ours, theirs) = (self.inner.config.net_window, hello.window as usize);
        let (streams, stream) = (hello.streams as usize, hello.stream as usize);
        let known = self.connections.get(&hello.key()).map(|(_, connection)| connection.upgrade());
        let known = match known.map(|known| known.filter(|connection| !connection.is_over())) {
            Some(None) => return Err(("its connection is closed".to_owned(), conn)),
            Some(Some(connection)) if !connection.is_free(stream) => {
                return Err((format!("the position of stream {stream} is not free yet"), conn));
            }
            known => known.flatten(),
        };
        let most = tinynccl_sys::config::MAX_STREAMS;
        let wrong = if ours != theirs {
            Some(format!("TINYNCCL_NET_WINDOW is {ours} at one end and {theirs} at the other: set it alike everywhere"))
        } else if !(1..=most).contains(&streams) || stream >= streams && known.is_none() {
            Some(format!("expected at most {most} streams, got stream {stream} of {streams}"))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            self.deliver(hello.listener, Err(self.failed(&conn.address(), &wrong)));
            // It has gone, or receives it.
            let _ = conn.reply(&Reply::Refused(wrong));
            return Ok(());
        }
        if let Err(e) = conn.reply(&Reply::Welcome) {
            return Err((e, conn));
        }
        match (known, socket(conn)) {
            (Some(connection), Some(socket)) => {
                let added = connection.add(stream, socket, &self.inner.workers);
                let how = if added { "is new" } else { "is too late" };
                log::info!("net: {}: stream {stream} {how}", connection.name());
            }
            (None, Some(socket)) => self.add_to_partial(socket, hello, route),
            (_, None) => {}
        }
        Ok(())
    }

    /// Takes in a stream of a new connection, which is delivered to its listener once it has all.
    fn add_to_partial(&mut self, socket: Socket, hello: &StreamHello, route: &[SocketAddr]) {
        let deadline = Instant::now() + self.inner.config.connect_timeout;
        let new = || Partial { route: Vec::new(), sockets: Vec::new(), deadline };
        let partial = self.partial.entry(hello.key()).or_insert_with(new);
        relay::add_route(&mut partial.route, route);
        partial.sockets.resize_with(partial.sockets.len().max(hello.streams as usize), || None);
        if let Some(position) = partial.sockets.get_mut(hello.stream as usize) {
            *position = Some(socket);
        }
        if partial.sockets.iter().all(Option::is_some)
            && let Some(whole) = self.partial.remove(&hello.key())
        {
            let sockets: Vec<Socket> = whole.sockets.into_iter().flatten().collect();
            let paths = Paths { several: hello.routes > 1, relayed: !whole.route.is_empty() };
            let made = self.receiver(sockets, paths, &whole.route).and_then(|made| {
                let secret = lock(&self.shared.listeners).get(&hello.listener).map(|waiting| waiting.secret);
                // Without its listener the connection is dropped at once.
                if let Some(secret) = secret.filter(|_| made.connection.several()) {
                    self.connections.retain(|_, (_, connection)| connection.strong_count() > 0);
                    self.connections.insert(hello.key(), (secret, Arc::downgrade(&made.connection)));
                    self.inner.monitor.watch(&self.inner.config, &made.connection)?;
                }
                Ok(made)
            });
            self.deliver(hello.listener, made);
        }
    }

    fn receiver(&self, sockets: Vec<Socket>, paths: Paths, route: &[SocketAddr]) -> Result<Receiver> {
        let name = super::dialer::name(&sockets, route);
        log::info!("accepted {name}");
        ends::receiver(name, (sockets, paths), &self.inner.resources())
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
