//! Where a rank is reached, and how it reaches the others: `shm`, `tcp` and `verbs` links.
//!
//! Both ranks call [`Endpoint::connect`]. The lower one dials. At the higher one, a thread of the endpoint (the
//! [`acceptor`]) takes connections, checks the handshake and files them; `connect` picks its own up and answers. A connection
//! for another rank is one hop of a relayed link ([`super::relay`]): [`hop`] makes the next one and joins the two.

mod acceptor;
mod conn;
mod hop;

use std::fmt;
use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::doorbell::Doorbell;
use super::handshake::{Caller, Hello, Reply};
use super::relay::{self, Path, Routes, Traffic};
use super::ring::LendFrom;
use super::verbs::{self, VerbsAddress};
use super::wait::Wait;
use super::{LinkOptions, LinkPair, Peer, checksum, shm, tcp};
use crate::bootstrap::Host;
use crate::bootstrap::interface::{LocalAddress, order_candidates, with_loopback};
use crate::config::{Config, SingleCopy, TransportChoice};
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::secret::Secret;
use acceptor::{Key, Shared};
use conn::Conn;
use hop::{Relay, World};

/// What carries a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Shared memory.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA.
    Verbs,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Shm => "shm",
            Kind::Tcp => "tcp",
            Kind::Verbs => "verbs",
        })
    }
}

/// How others reach a rank. The rendezvous tells it to all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// Addresses and ports, loopback included.
    pub tcp: Vec<SocketAddr>,
    /// Name of the Unix socket in the abstract namespace; `None` without shared memory.
    pub unix: Option<String>,
    /// Ports of RDMA devices; empty when RDMA is not asked for.
    #[serde(default)]
    pub verbs: Vec<VerbsAddress>,
    /// Machine, network namespace and user.
    pub host: Host,
    /// Process id, for messages.
    pub pid: u32,
}

/// Which link is meant.
#[derive(Debug, Clone, Copy)]
pub struct ConnectTo<'a> {
    /// Communicator id.
    pub comm: u32,
    /// The peer's rank in the world.
    pub peer_rank: usize,
    /// How it is reached.
    pub info: &'a EndpointInfo,
    /// Channel: several links between the same two ranks differ in it.
    pub channel: u32,
    /// Equal at both ends.
    pub options: LinkOptions,
}

/// A rank's listeners. One per rank; shared by reference between the threads that connect.
///
/// Dropping it stops listening; links made before live on, but for those that it relays between others.
pub struct Endpoint {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

/// What the endpoint's threads share.
struct Inner {
    rank: usize,
    secret: Secret,
    transport: TransportChoice,
    checksum: bool,
    /// Streams of a TCP link, queue pairs of one over RDMA.
    streams: usize,
    single_copy: SingleCopy,
    /// What its links of shared memory lend on small pages.
    ordinary: LendFrom,
    sockets: tcp::SocketOptions,
    locals: Vec<LocalAddress>,
    rails: Option<Arc<verbs::Rails>>,
    info: EndpointInfo,
    shared: Arc<Shared>,
    relay: Relay,
}

/// One hop of a link, as the rank that dials sees it.
struct Hop<'a> {
    /// The ends of the link: ourselves and `next`, unless it is relayed.
    origin: usize,
    target: usize,
    /// The rank to dial.
    next: usize,
    info: &'a EndpointInfo,
    comm: u32,
    channel: u32,
    options: LinkOptions,
    /// The ends check every message.
    checksum: bool,
}

impl Endpoint {
    /// Listens on every address that `config.interface` lets through, and on a Unix socket unless TCP is asked for.
    ///
    /// `secret` is that of this start of the job: whoever does not know it is turned away.
    ///
    /// # Errors
    /// [`Error::Config`] for an interface or RDMA device that does not exist or a range of ports that are all taken, [`Error::Os`] when nothing can be listened on,
    /// [`Error::Unsupported`] when RDMA is asked for and there is none, in this build or on this machine.
    pub fn new(rank: usize, secret: Secret, config: &Config) -> Result<Endpoint> {
        Endpoint::listen(rank, secret, config, with_loopback(config)?)
    }

    /// [`Endpoint::new`] for a job whose ranks are all on this host: over TCP it listens on loopback alone.
    pub fn local(rank: usize, secret: Secret, config: &Config) -> Result<Endpoint> {
        let loopback = with_loopback(config)?.into_iter().find(|local| local.loopback);
        Endpoint::listen(rank, secret, config, Vec::from_iter(loopback))
    }

    fn listen(rank: usize, secret: Secret, config: &Config, locals: Vec<LocalAddress>) -> Result<Endpoint> {
        let rails = match config.transport {
            TransportChoice::Verbs => Some(Arc::new(verbs::Rails::open(rank, config)?)),
            _ => None,
        };
        let sockets = tcp::SocketOptions::new(config.socket_buffer, config.congestion.clone());
        let mut ports = Vec::new();
        let mut failed = None;
        for local in &locals {
            match tcp::Port::bind(local.ip, config.port_range, &sockets) {
                Ok(port) => {
                    log::debug!("rank {rank}: listening on {} ({})", port.addr, local.interface);
                    ports.push(port);
                }
                Err(e @ Error::Config { .. }) => return Err(e),
                Err(e) => {
                    log::warn!("rank {rank}: interface {}: {e}", local.interface);
                    failed = Some(e);
                }
            }
        }
        let unix = match config.transport {
            TransportChoice::Tcp | TransportChoice::Verbs => None,
            TransportChoice::Shm => Some(shm::Port::bind()?),
            TransportChoice::Auto => {
                shm::Port::bind().inspect_err(|e| log::warn!("rank {rank}: no shared memory: {e}")).ok()
            }
        };
        if let (true, None, Some(e)) = (ports.is_empty(), &unix, failed) {
            return Err(e);
        }
        let info = EndpointInfo {
            tcp: ports.iter().map(|p| p.addr).collect(),
            unix: unix.as_ref().map(|p| p.name.clone()),
            verbs: rails.as_ref().map(|r| r.addresses()).unwrap_or_default(),
            host: Host::current(),
            pid: std::process::id(),
        };
        let inner = Arc::new(Inner {
            rank,
            secret,
            transport: config.transport,
            checksum: config.checksum,
            streams: match config.transport {
                TransportChoice::Verbs => config.verbs_qps,
                _ => config.tcp_streams,
            },
            // A checksum is looked at before anything is written to where it belongs.
            single_copy: if config.checksum { SingleCopy::Off } else { config.single_copy },
            ordinary: LendFrom::default(),
            sockets,
            locals,
            rails,
            info,
            shared: Shared::new()?,
            relay: Relay::new(config.connect_timeout.min(config.timeout)),
        });
        let thread = acceptor::start(&inner, ports, unix)?;
        Ok(Endpoint { inner, thread: Some(thread), origin: Origin::here() })
    }

    /// Registers a caller's memory with all RDMA devices in use; `None` where there are none.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    pub(crate) unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<verbs::Registration>> {
        // SAFETY: by the caller.
        self.inner.rails.as_ref().map(|rails| unsafe { rails.register(base, bytes) }).transpose()
    }

    /// From now on links of shared memory lend messages of so many bytes and more on ordinary pages, where the choice is theirs.
    pub(crate) fn lend_from(&self, bytes: usize) {
        self.inner.ordinary.set(bytes);
    }

    /// How others reach this rank.
    pub fn info(&self) -> EndpointInfo {
        self.inner.info.clone()
    }

    /// Tells how all ranks are reached, and which of them reach each other: from now on this rank relays between others, and
    /// reaches those that it has no common subnet with through others. `routes: None` for what the RDMA ports say; every rank
    /// must come to the same. Without this call every link is direct.
    pub fn introduce(&self, world: Vec<EndpointInfo>, routes: Option<Routes>) {
        let routes = routes.unwrap_or_else(|| match &self.inner.rails {
            Some(_) => relay::over_rdma(&world.iter().map(|info| &info.verbs[..]).collect::<Vec<_>>()),
            None => Routes::direct(),
        });
        self.inner.relay.introduce(World { infos: world, routes });
    }

    /// The ranks that this one cannot reach by itself, and how it does; with `everyone`, those of every pair.
    pub fn paths(&self, everyone: bool) -> Vec<Path> {
        let Some(world) = self.inner.relay.world() else { return Vec::new() };
        let mut paths = world.routes.paths();
        paths.retain(|path| everyone || path.ends.contains(&self.inner.rank));
        paths
    }

    /// What this rank has relayed.
    pub fn traffic(&self) -> Traffic {
        self.inner.relay.traffic()
    }

    /// Whether two ranks may still need this one as a relay, when those for which `gone` have left for good: it should not be
    /// dropped before.
    pub fn is_needed(&self, gone: &dyn Fn(usize) -> bool) -> bool {
        let ours = |path: &Path| path.around(self.inner.rank).is_some();
        self.paths(true).iter().any(|path| ours(path) && !path.ends.iter().any(|&end| gone(end)))
            || self.traffic().links > 0
    }

    /// What will carry the links to a peer, and why. Both ends choose the same when they have the same configuration.
    pub fn choose(&self, peer: &EndpointInfo) -> (Kind, String) {
        self.inner.choose(peer)
    }

    /// One end of a link; waits until the peer calls this for the other end.
    ///
    /// `doorbell` is what a peer in shared memory rings. With [`Config::checksum`] the link checks every message.
    /// In automatic mode a link whose shared memory does not work out falls back to TCP. Where no port of ours shares a subnet
    /// with one of the peer's, the link goes through other ranks, if [`Endpoint::introduce`] has named some that can.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `deadline`, whatever `abort` returns (asked every 20 ms), [`Error::PeerLost`] when no
    /// address of the peer answers, [`Error::Protocol`] at both ends when their options differ, [`Error::Unsupported`] when
    /// shared memory or RDMA is asked for and the two can not have it.
    pub fn connect(
        &self,
        to: &ConnectTo<'_>,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
        deadline: Duration,
    ) -> Result<LinkPair> {
        self.origin.check(|| "connect".to_owned(), self.inner.rank)?;
        self.inner.connect(to, doorbell, abort, deadline)
    }
}

impl Inner {
    fn choose(&self, peer: &EndpointInfo) -> (Kind, String) {
        match (self.transport, self.separation(peer)) {
            (TransportChoice::Tcp, _) => (Kind::Tcp, "TINYNCCL_TRANSPORT=tcp".to_owned()),
            (TransportChoice::Verbs, _) => (Kind::Verbs, "TINYNCCL_TRANSPORT=verbs".to_owned()),
            (TransportChoice::Shm, _) => (Kind::Shm, "TINYNCCL_TRANSPORT=shm".to_owned()),
            (TransportChoice::Auto, None) => (Kind::Shm, "same machine, network namespace and user".to_owned()),
            (TransportChoice::Auto, Some(why)) => (Kind::Tcp, why.to_owned()),
        }
    }

    fn separation(&self, peer: &EndpointInfo) -> Option<&'static str> {
        self.info
            .host
            .separation(&peer.host)
            .or_else(|| (self.info.unix.is_none() || peer.unix.is_none()).then_some("one of them has no Unix socket"))
    }

    /// See [`Endpoint::connect`].
    fn connect(
        &self,
        to: &ConnectTo<'_>,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
        deadline: Duration,
    ) -> Result<LinkPair> {
        let (rank, peer) = (self.rank, to.peer_rank);
        if peer == rank {
            return Err(Error::invalid("connect", format!("rank {rank} asked for a link with itself")));
        }
        to.options.check()?;
        if let (TransportChoice::Shm, Some(why)) = (self.transport, self.separation(to.info)) {
            let what = format!("shared memory between rank {rank} and rank {peer}");
            return Err(Error::Unsupported { what, detail: format!("{why}; set TINYNCCL_TRANSPORT=auto or tcp") });
        }
        let world = self.relay.world();
        let path = world.as_ref().and_then(|world| world.routes.path(rank, peer));
        let relay = path.as_ref().and_then(|path| path.first(rank));
        let relay = relay.and_then(|relay| Some((relay, world.as_ref()?.infos.get(relay)?)));
        if let (Some(rails), None) = (&self.rails, relay) {
            rails.check(peer, &to.info.verbs, world.is_some())?;
        }
        let (next, info) = relay.unwrap_or((peer, to.info));
        let wait = Wait::new(rank, peer, deadline, abort);
        let made = if rank < peer {
            let ConnectTo { comm, channel, options, .. } = *to;
            let hop = Hop { origin: rank, target: peer, next, info, comm, channel, options, checksum: self.checksum };
            self.dial(&hop, doorbell, &wait)
        } else {
            self.await_dialer(to, doorbell, &wait)
        };
        let pair = match (made, &path) {
            (Ok(pair), Some(path)) => {
                log::info!("rank {rank}: {path} (comm {}, channel {})", to.comm, to.channel);
                relay::wrap(pair, peer, next, &path.relays())
            }
            (Ok(pair), None) => pair,
            (Err(e), Some(path)) => return Err(hop::on_the_way(e, path)),
            (Err(e), None) => return Err(e),
        };
        let why = self.choose(info).1;
        log::debug!("rank {rank}: comm {} channel {} to rank {peer}: {} ({why})", to.comm, to.channel, pair.kind);
        Ok(if self.checksum { checksum::wrap(pair) } else { pair })
    }

    fn dial(&self, hop: &Hop<'_>, bell: &Arc<Doorbell>, wait: &Wait<'_>) -> Result<LinkPair> {
        let kind = self.choose(hop.info).0;
        let link = (hop.comm, hop.channel);
        let hello = Hello::new((self.rank, hop.next), link, &hop.options, hop.checksum, self.streams)
            .on_the_way(hop.origin, hop.target)
            .over_verbs(kind == Kind::Verbs);
        let caller = Caller { hello, secret: self.secret };
        if let (Kind::Shm, Some(name)) = (kind, &hop.info.unix) {
            match shm::connect(name, &caller, &hop.options, bell, (self.single_copy, &self.ordinary), wait)? {
                shm::Dialed::Linked(pair) => return Ok(pair),
                shm::Dialed::NotPossible(why) if self.transport == TransportChoice::Shm => {
                    let what = format!("shared memory between rank {} and rank {}", self.rank, hop.next);
                    return Err(Error::Unsupported {
                        what,
                        detail: format!("{why}; set TINYNCCL_TRANSPORT=auto or tcp"),
                    });
                }
                shm::Dialed::NotPossible(why) => {
                    log::warn!("rank {}: no shared memory with rank {}, using tcp: {why}", self.rank, hop.next);
                }
            }
        }
        let same_network = self.info.host.same_network(&hop.info.host);
        let candidates = order_candidates(&self.locals, &hop.info.tcp, same_network);
        if let Some(rails) = &self.rails {
            let (socket, _, who) = tcp::reach(&candidates, &caller, &self.sockets, wait)?;
            let theirs = (&hop.info.verbs[..], hop.channel);
            return verbs::connect(rails, socket, who, theirs, &hop.options, wait, &self.shared.linger);
        }
        tcp::connect(&candidates, &caller, &hop.options, &self.sockets, wait, &self.shared.linger)
    }

    fn await_dialer(&self, to: &ConnectTo<'_>, bell: &Arc<Doorbell>, wait: &Wait<'_>) -> Result<LinkPair> {
        let (origin, target) = (to.peer_rank as u32, self.rank as u32);
        let key = Key { comm: to.comm, origin, target, channel: to.channel, stream: 0 };
        loop {
            let detail = || {
                let at: Vec<String> = self.info.tcp.iter().map(ToString::to_string).collect();
                format!(
                    "it has not connected to us at {}; see its output, and whether its networks lead there: TINYNCCL_IFNAME chooses the interfaces",
                    at.join(" or ")
                )
            };
            let (hello, conn) = self.shared.take(&key, wait, detail)?;
            match self.accept(&hello, conn, (&to.options, self.checksum), bell, wait)? {
                Ok(pair) => return Ok(pair),
                Err(e) => log::warn!("rank {}: a connection from rank {} failed: {e}", self.rank, to.peer_rank),
            }
        }
    }

    /// Answers a dialer and makes our end of what it asks for, if that is what we want. The outer error is final; after the
    /// inner one the dialer may come again.
    fn accept(
        &self,
        hello: &Hello,
        mut conn: Conn,
        (options, checksum): (&LinkOptions, bool),
        bell: &Arc<Doorbell>,
        wait: &Wait<'_>,
    ) -> Result<Result<LinkPair, String>> {
        let ranks = (self.rank, wait.peer);
        if let Some(differs) = hello.differs(options, checksum, self.streams, self.rails.is_some()) {
            let address = conn.address();
            if let Err(e) = conn.reply(&Reply::Refused(differs.clone())) {
                log::debug!("rank {}: refusing rank {}: {e}", self.rank, hello.from);
            }
            return Err(Peer { rank: self.rank, peer: wait.peer, address }.protocol("connect", differs));
        }
        let pending = match conn {
            Conn::Unix(pending) => {
                return Ok(shm::finish(pending, ranks, options, bell, (self.single_copy, &self.ordinary)));
            }
            Conn::Tcp(pending) => pending,
        };
        let welcome = Reply::Welcome;
        if let Some(rails) = &self.rails {
            let who = Peer { rank: self.rank, peer: wait.peer, address: pending.address() };
            return match pending.welcome(&welcome) {
                Ok(socket) => verbs::finish(rails, socket, who, options, wait, &self.shared.linger).map(Ok),
                Err(e) => Ok(Err(e)),
            };
        }
        let mut streams = 1..self.streams;
        let key = Key::of(hello);
        let next = || streams.next().map(|stream| self.await_stream(Key { stream, ..key }, wait));
        tcp::finish(pending, &welcome, ranks, options, &self.shared.linger, next)
    }

    /// The connection of a further stream of a link that is being made.
    fn await_stream(&self, key: Key, wait: &Wait<'_>) -> Result<tcp::Pending> {
        loop {
            let detail = || format!("it has not connected stream {} of {}", key.stream + 1, self.streams);
            match self.shared.take(&key, wait, detail)? {
                (_, Conn::Tcp(pending)) => return Ok(pending),
                (_, Conn::Unix(_)) => log::warn!("rank {}: turned away a stream over a Unix socket", self.rank),
            }
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("rank", &self.inner.rank)
            .field("info", &self.inner.info)
            .finish_non_exhaustive()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return std::mem::forget((self.inner.clone(), self.thread.take()));
        }
        self.inner.relay.stop();
        self.inner.shared.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("rank {}: the acceptor panicked", self.inner.rank);
        }
    }
}
