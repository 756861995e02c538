//! Endpoint of a rank: listens for the other ranks, and reaches them over the first of its [`Fabric`]s that does.
//!
//! Both ranks call [`Endpoint::connect`]. The lower one dials. At the higher one, a thread of the endpoint (the
//! [`acceptor`]) takes connections, checks the handshake and files them; `connect` picks its own up and answers. A
//! connection for another rank is one hop of a relayed link ([`super::relay`]): [`hop`] makes the next one and joins
//! the two.

mod acceptor;
mod hop;
mod mail;
pub(crate) mod newcomer;

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::accept::acceptor::{Acceptor, Incoming};
use super::accept::conn::Conn;
use super::accept::handshake::Reply;
use super::accept::link::LinkHello;
use super::fabric::{Accept, Bind, Dial, Dialed, Fabric, Registration, Site, unreachable};
use super::relay::{self, Path, Routes, Traffic};
use super::wait::Wait;
use super::{EndpointInfo, LinkOptions, LinkPair, Peer, beacon, seal, shm, tcp, verbs};
use crate::bootstrap::Host;
use crate::bootstrap::interface::{LocalAddress, with_loopback};
use acceptor::{Backlog, Key};
use hop::{Relay, World};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, TransportChoice};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::secret::Secret;

/// Times that a peer is dialed again that has gone away while a link was made, and the first pause before that.
const ROUNDS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(25);

/// The transports of an endpoint, the preferred one first. `sockets`: TCP, or what takes its place.
fn fabrics(choice: TransportChoice, sockets: Bind) -> Vec<Bind> {
    match choice {
        TransportChoice::Auto | TransportChoice::Shm => vec![("shared memory", shm::bind), sockets],
        TransportChoice::Tcp => vec![sockets],
        TransportChoice::Verbs => vec![("RDMA", verbs::bind)],
    }
}

/// A link to be made: the communicator, the peer, the channel and the options.
#[derive(Debug, Clone, Copy)]
pub struct ConnectTo<'a> {
    /// Communicator id.
    pub comm: u32,
    /// The peer's rank in the world.
    pub peer_rank: usize,
    /// The peer's [`Endpoint::info`].
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
    // Dropped before what it hands connections to.
    _acceptor: Acceptor,
    inner: Arc<Inner>,
    origin: Origin,
}

/// State shared by the endpoint's threads.
struct Inner {
    rank: usize,
    secret: Secret,
    transport: TransportChoice,
    encrypt: bool,
    /// The preferred one first; unless the choice is automatic, no other one dials.
    fabrics: Arc<[Box<dyn Fabric>]>,
    info: EndpointInfo,
    backlog: Arc<Backlog>,
    relay: Relay,
    /// The addresses that messages to other ranks leave from.
    locals: Vec<LocalAddress>,
    receive: OnceLock<mail::Receive>,
    /// Newcomers are let in once it is open.
    admission: OnceLock<newcomer::Admission>,
}

/// One hop of a link, as the rank that dials sees it.
struct Hop<'a> {
    /// The ends of the link: ourselves and `next`, unless it is relayed.
    origin: usize,
    target: usize,
    /// The rank to dial.
    next: usize,
    /// The rank that errors name.
    peer: usize,
    info: &'a EndpointInfo,
    comm: u32,
    channel: u32,
    options: LinkOptions,
}

impl Endpoint {
    /// Listens on every address that `config.interface` lets through, and on a Unix socket unless TCP is asked for.
    ///
    /// `secret` is that of this start of the job: a connection from a process that does not know it is rejected.
    ///
    /// # Errors
    /// [`Error::Config`] for an interface or RDMA device that does not exist or a range of ports that are all taken,
    /// [`Error::Os`] when nothing can be listened on, [`Error::Unsupported`] when RDMA is asked for and there is none,
    /// in this build or on this machine.
    pub fn new(rank: usize, secret: Secret, config: &Config) -> Result<Endpoint> {
        Endpoint::over(rank, secret, config, tcp::BIND)
    }

    /// [`Endpoint::new`] with another transport in the place of TCP.
    pub(crate) fn over(rank: usize, secret: Secret, config: &Config, sockets: Bind) -> Result<Endpoint> {
        Endpoint::listen(rank, secret, config, with_loopback(config)?, sockets)
    }

    /// [`Endpoint::new`] for a job whose ranks are all on this host: over TCP it listens on loopback alone.
    pub fn local(rank: usize, secret: Secret, config: &Config) -> Result<Endpoint> {
        let loopback = with_loopback(config)?.into_iter().find(|local| local.loopback);
        Endpoint::listen(rank, secret, config, Vec::from_iter(loopback), tcp::BIND)
    }

    /// An endpoint with the caller's own transports, the preferred one first.
    ///
    /// # Errors
    /// [`Error::Os`] when the thread that accepts cannot be started.
    pub fn with_fabrics(
        rank: usize,
        secret: Secret,
        config: &Config,
        fabrics: Vec<Box<dyn Fabric>>,
    ) -> Result<Endpoint> {
        Endpoint::start(rank, secret, config, Backlog::new()?, fabrics, Vec::new())
    }

    fn listen(
        rank: usize,
        secret: Secret,
        config: &Config,
        locals: Vec<LocalAddress>,
        sockets: Bind,
    ) -> Result<Endpoint> {
        if config.encrypt {
            seal::is_possible()?;
            if config.transport == TransportChoice::Verbs {
                let detail = "RDMA cannot be encrypted: with TINYNCCL_ENCRYPT=1 expected auto, tcp or shm".to_owned();
                return Err(Error::config("TINYNCCL_TRANSPORT", config.transport, detail));
            }
        }
        let backlog = Backlog::new()?;
        let site = Site { rank, config, locals: &locals, linger: &backlog.linger };
        let mut bound = Vec::new();
        let mut failed = None;
        for (i, (name, bind)) in fabrics(config.transport, sockets).into_iter().enumerate() {
            match bind(&site) {
                Ok(fabric) => bound.push(fabric),
                Err(e @ Error::Config { .. }) => return Err(e),
                Err(e) if i == 0 && config.transport != TransportChoice::Auto => return Err(e),
                Err(e) => {
                    log::warn!("rank {rank}: no {name}: {e}");
                    failed = Some(e);
                }
            }
        }
        match failed {
            Some(e) if bound.is_empty() => Err(e),
            _ => Endpoint::start(rank, secret, config, backlog, bound, locals),
        }
    }

    fn start(
        rank: usize,
        secret: Secret,
        config: &Config,
        backlog: Arc<Backlog>,
        fabrics: Vec<Box<dyn Fabric>>,
        locals: Vec<LocalAddress>,
    ) -> Result<Endpoint> {
        let mut info = EndpointInfo {
            tcp: Vec::new(),
            unix: None,
            verbs: Vec::new(),
            other: BTreeMap::new(),
            beacon: beacon::ours(),
            host: Host::of(config),
            pid: std::process::id(),
        };
        for fabric in &fabrics {
            fabric.describe(&mut info);
        }
        let inner = Arc::new(Inner {
            rank,
            secret,
            transport: config.transport,
            encrypt: config.encrypt,
            fabrics: fabrics.into(),
            info,
            backlog,
            relay: Relay::new(config.connect_timeout.min(config.timeout)),
            locals,
            receive: OnceLock::new(),
            admission: OnceLock::new(),
        });
        Ok(Endpoint { _acceptor: acceptor::start(&inner)?, inner, origin: Origin::here() })
    }

    /// Registers a caller's memory with all RDMA devices in use; `None` where there are none.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    pub unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<Registration>> {
        for fabric in &*self.inner.fabrics {
            // SAFETY: by the caller.
            if let Some(registration) = unsafe { fabric.register(base, bytes) }? {
                return Ok(Some(registration));
            }
        }
        Ok(None)
    }

    /// Makes links over shared memory use zero copy from now on for messages of at least `bytes` bytes on ordinary
    /// pages, where the choice is theirs.
    pub fn zero_copy_from(&self, bytes: usize) {
        self.inner.fabrics.iter().for_each(|fabric| fabric.zero_copy_from(bytes));
    }

    /// Returns the addresses at which other ranks reach this one.
    pub fn info(&self) -> EndpointInfo {
        self.inner.info.clone()
    }

    /// The ranks of `world` that cannot be reached without others between, as far as this one can tell.
    pub fn far(&self, world: &[EndpointInfo]) -> Vec<usize> {
        let Inner { rank, info, .. } = &*self.inner;
        let near = |peer: &EndpointInfo| self.inner.candidates(peer).0.iter().any(|f| f.leads_to(info, peer));
        world.iter().enumerate().filter(|(peer, info)| peer != rank && !near(info)).map(|(peer, _)| peer).collect()
    }

    /// Sets how all ranks are reached, and which of them reach each other: from now on this rank relays between others,
    /// and reaches those that are [far](Endpoint::far) through others. Every rank must be given the same. Without this
    /// call every link is direct.
    pub fn introduce(&self, world: Vec<EndpointInfo>, routes: Routes) {
        self.inner.relay.introduce(World { infos: world, routes });
    }

    /// Returns the paths to the ranks that this one cannot reach by itself; with `everyone`, those between all pairs.
    pub fn paths(&self, everyone: bool) -> Vec<Path> {
        let Some(world) = self.inner.relay.world() else { return Vec::new() };
        let mut paths = world.routes.paths();
        paths.retain(|path| everyone || path.ends.contains(&self.inner.rank));
        paths
    }

    /// Returns counts of the links, messages and bytes that this rank relays.
    pub fn traffic(&self) -> Traffic {
        self.inner.relay.traffic()
    }

    /// Returns true while two ranks may still need this one as a relay, when those for which `gone` is true have left
    /// for good: it should not be dropped before.
    pub fn is_needed(&self, gone: &dyn Fn(usize) -> bool) -> bool {
        let ours = |path: &Path| path.around(self.inner.rank).is_some();
        self.paths(true).iter().any(|path| ours(path) && !path.ends.iter().any(|&end| gone(end)))
            || self.traffic().links > 0
    }

    /// Returns the transport ([`Fabric::kind`]) that will carry the links to a peer, and the reason. Both ends choose
    /// the same when they have the same configuration.
    pub fn choose(&self, peer: &EndpointInfo) -> (&'static str, String) {
        let (candidates, why) = self.inner.candidates(peer);
        (candidates.first().map_or("none", |fabric| fabric.kind()), why)
    }

    /// One end of a link; waits until the peer calls this for the other end.
    ///
    /// `doorbell` is what a peer in shared memory rings. In
    /// automatic mode a link whose shared memory does not work out falls back to TCP. Where no port of ours shares a
    /// subnet with one of the peer's, the link goes through other ranks, if [`Endpoint::introduce`] has named some that
    /// can.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `deadline`, whatever `abort` returns (asked every 20 ms), [`Error::PeerLost`] when no
    /// address of the peer answers, [`Error::Protocol`] at both ends when their options differ, [`Error::Unsupported`]
    /// when shared memory or RDMA is asked for and the two can not have it.
    pub fn connect(
        &self,
        to: &ConnectTo<'_>,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
        deadline: Duration,
    ) -> Result<LinkPair> {
        self.origin.check(|| "connect".to_owned(), self.inner.rank)?;
        let inner = &*self.inner;
        let (rank, peer) = (inner.rank, to.peer_rank);
        if peer == rank {
            return Err(Error::invalid("connect", format!("rank {rank} asked for a link with itself")));
        }
        to.options.check()?;
        let world = inner.relay.world();
        let path = world.as_ref().and_then(|world| world.routes.path(rank, peer));
        let relay = path.as_ref().and_then(|path| path.first(rank));
        let relay = relay.and_then(|relay| Some((relay, world.as_ref()?.infos.get(relay)?)));
        if relay.is_none() {
            inner.check(to, world.is_some())?;
        }
        let (next, info) = relay.unwrap_or((peer, to.info));
        let wait = Wait::new(rank, peer, deadline, abort);
        let made = if rank < peer {
            let ConnectTo { comm, channel, options, .. } = *to;
            let hop = Hop { origin: rank, target: peer, next, peer, info, comm, channel, options };
            inner.dial(&hop, doorbell, &wait)
        } else {
            inner.await_dialer(to, doorbell, &wait)
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
        let why = inner.candidates(info).1;
        log::debug!("rank {rank}: comm {} channel {} to rank {peer}: {} ({why})", to.comm, to.channel, pair.kind);
        Ok(pair)
    }
}

impl Inner {
    /// The fabrics that dial a peer, the preferred one first, and why it is.
    fn candidates(&self, peer: &EndpointInfo) -> (Vec<&dyn Fabric>, String) {
        if self.transport != TransportChoice::Auto {
            let first = self.fabrics.first().map(|fabric| &**fabric);
            return (Vec::from_iter(first), format!("TINYNCCL_TRANSPORT={}", self.transport));
        }
        let mut candidates = Vec::new();
        let mut reason = None;
        for fabric in &*self.fabrics {
            match fabric.reaches(&self.info, peer) {
                Ok(why) => {
                    reason.get_or_insert(why.to_owned());
                    candidates.push(&**fabric);
                }
                Err(why) if candidates.is_empty() => reason = Some(why),
                Err(_) => {}
            }
        }
        (candidates, reason.unwrap_or_default())
    }

    /// Fails when a peer cannot be reached without relays.
    fn check(&self, to: &ConnectTo<'_>, has_routes: bool) -> Result<()> {
        let (candidates, why) = self.candidates(to.info);
        let (name, why) = match candidates.first() {
            None => ("a link", why),
            Some(first) => match first.reaches(&self.info, to.info) {
                Ok(_) => return Ok(()),
                Err(why) => (first.name(), why),
            },
        };
        let nor = if has_routes { "; nor is there a way between them through other ranks" } else { "" };
        Err(unreachable(name, self.rank, to.peer_rank, &format!("{why}{nor}")))
    }

    fn dial(&self, hop: &Hop<'_>, bell: &Arc<Doorbell>, wait: &Wait<'_>) -> Result<LinkPair> {
        let mut candidates = self.candidates(hop.info).0.into_iter().peekable();
        let mut refused = ("a link", "no transport reaches it".to_owned());
        let mut rounds = 0..ROUNDS;
        while let Some(&fabric) = candidates.peek() {
            let link = (hop.comm, hop.channel);
            let hello = LinkHello::new((self.rank, hop.next), link, &hop.options, fabric.streams())
                .on_the_way(hop.origin, hop.target)
                .over_verbs(fabric.kind() == "verbs");
            let dial = Dial {
                info: hop.info,
                channel: hop.channel,
                options: &hop.options,
                bell,
                ours: &self.info,
                hello,
                secret: self.secret,
                ranks: (self.rank, hop.peer),
                wait,
            };
            let (why, gone) = match fabric.dial(&dial)? {
                Dialed::Linked(pair) => return Ok(pair),
                Dialed::NotPossible(why) => (why, false),
                Dialed::Gone(why) => (why, true),
            };
            // One that has too much to do may close a connection, too.
            if gone && let Some(round) = rounds.next() {
                wait.pause(PAUSE * (1 << round), || why.clone())?;
                continue;
            }
            candidates.next();
            if gone && candidates.peek().is_none() {
                let peer = Peer { rank: self.rank, peer: hop.next, address: fabric.name().to_owned() };
                return Err(peer.lost("connect", &why));
            }
            if let Some(next) = candidates.peek() {
                let (rank, name, next) = (self.rank, fabric.name(), next.kind());
                log::warn!("rank {rank}: no {name} with rank {}, using {next}: {why}", hop.next);
            }
            refused = (fabric.name(), why);
        }
        Err(unreachable(refused.0, self.rank, hop.next, &refused.1))
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
            let (hello, incoming) = self.backlog.take(&key, wait, detail)?;
            match self.accept(&hello, incoming, &to.options, bell, (to.peer_rank, wait))? {
                Ok(pair) => return Ok(pair),
                Err(e) => log::warn!("rank {}: a connection from rank {} failed: {e}", self.rank, to.peer_rank),
            }
        }
    }

    /// Answers a dialer and makes our end of what it asks for, if that is what we want. The outer error is final; after
    /// the inner one the dialer may come again.
    fn accept(
        &self,
        hello: &LinkHello,
        Incoming { listener: index, mut conn }: Incoming,
        options: &LinkOptions,
        bell: &Arc<Doorbell>,
        (peer, wait): (usize, &Wait<'_>),
    ) -> Result<Result<LinkPair, String>> {
        let Some(fabric) = self.fabrics.get(index) else { return Ok(Err("no such fabric".to_owned())) };
        if let Some(differs) = hello.differs(options, fabric.streams(), fabric.kind() == "verbs") {
            let address = conn.address();
            if let Err(e) = conn.reply(&Reply::Refused(differs.clone())) {
                log::debug!("rank {}: refusing rank {}: {e}", self.rank, hello.from);
            }
            return Err(Peer { rank: self.rank, peer, address }.protocol("connect", differs));
        }
        let further = |stream: usize| self.await_stream(Key { stream, ..Key::of(hello) }, index, wait);
        fabric.accept(conn, &Accept { options, bell, ranks: (self.rank, peer), wait, further: &further })
    }

    /// The connection of a further stream of a link that is being made over a fabric.
    fn await_stream(&self, key: Key, fabric: usize, wait: &Wait<'_>) -> Result<Box<dyn Conn>> {
        loop {
            let detail = || format!("it has not connected stream {} of the link", key.stream + 1);
            match self.backlog.take(&key, wait, detail)?.1 {
                incoming if incoming.listener == fabric => return Ok(incoming.conn),
                other => log::warn!("rank {}: turned away a stream from {}", self.rank, other.conn.address()),
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
            return std::mem::forget(self.inner.clone());
        }
        self.inner.relay.setups.stop();
    }
}
