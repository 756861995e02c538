//! Where a rank is reached, and how it reaches the others: `shm`, `tcp` and `verbs` links.
//!
//! Both ranks call [`Endpoint::connect`]. The lower one dials. At the higher one, a thread of the endpoint (the
//! [`acceptor`]) takes connections, checks the handshake and files them; `connect` picks its own up and answers.

mod acceptor;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::doorbell::Doorbell;
use super::handshake::{Hello, Reply};
use super::verbs::{self, VerbsAddress};
use super::wait::Wait;
use super::{LinkOptions, LinkPair, Peer, checksum, shm, tcp};
use crate::bootstrap::Host;
use crate::bootstrap::interface::{LocalAddress, order_candidates, with_loopback};
use crate::config::{Config, SingleCopy, TransportChoice};
use crate::error::{Error, Result};
use acceptor::{Conn, Key, Shared};

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
/// Dropping it stops listening; links made before live on.
pub struct Endpoint {
    rank: usize,
    token: [u8; 16],
    transport: TransportChoice,
    checksum: bool,
    streams: usize,
    single_copy: SingleCopy,
    sockets: tcp::SocketOptions,
    locals: Vec<LocalAddress>,
    rails: Option<Arc<verbs::Rails>>,
    info: EndpointInfo,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens on every address that `config.interface` lets through, and on a Unix socket unless TCP is asked for.
    ///
    /// `token` is the job's secret: whoever does not know it is turned away.
    ///
    /// # Errors
    /// [`Error::Config`] for an interface or RDMA device that does not exist, [`Error::Os`] when nothing can be listened on,
    /// [`Error::Unsupported`] when RDMA is asked for and there is none, in this build or on this machine.
    pub fn new(rank: usize, token: [u8; 16], config: &Config) -> Result<Endpoint> {
        let rails = match config.transport {
            TransportChoice::Verbs => Some(Arc::new(verbs::Rails::open(rank, config)?)),
            _ => None,
        };
        let locals = with_loopback(config)?;
        let sockets = tcp::SocketOptions::new(config.socket_buffer, config.congestion.clone());
        let mut ports = Vec::new();
        let mut failed = None;
        for local in &locals {
            match tcp::Port::bind(local.ip, &sockets) {
                Ok(port) => {
                    log::debug!("rank {rank}: listening on {} ({})", port.addr, local.interface);
                    ports.push(port);
                }
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
        let shared = Shared::new()?;
        let thread = acceptor::start(rank, token, ports, unix, rails.clone(), shared.clone())?;
        Ok(Endpoint {
            rank,
            token,
            transport: config.transport,
            checksum: config.checksum,
            streams: config.tcp_streams,
            single_copy: config.single_copy,
            sockets,
            locals,
            rails,
            info,
            shared,
            thread: Some(thread),
        })
    }

    /// How others reach this rank.
    pub fn info(&self) -> EndpointInfo {
        self.info.clone()
    }

    /// What will carry the links to a peer, and why. Both ends choose the same when they have the same configuration.
    pub fn choose(&self, peer: &EndpointInfo) -> (Kind, String) {
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

    /// One end of a link; waits until the peer calls this for the other end.
    ///
    /// `doorbell` is what a peer in shared memory rings. With [`Config::checksum`] the link checks every message.
    /// In automatic mode a link whose shared memory does not work out falls back to TCP.
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
        if to.peer_rank == self.rank {
            return Err(Error::invalid("connect", format!("rank {} asked for a link with itself", self.rank)));
        }
        to.options.check()?;
        if let (TransportChoice::Shm, Some(why)) = (self.transport, self.separation(to.info)) {
            let what = format!("shared memory between rank {} and rank {}", self.rank, to.peer_rank);
            return Err(Error::Unsupported { what, detail: format!("{why}; set TINYNCCL_TRANSPORT=auto or tcp") });
        }
        if let Some(rails) = &self.rails {
            rails.check(to.peer_rank, &to.info.verbs)?;
        }
        let wait = Wait::new(self.rank, to.peer_rank, deadline, abort);
        let (kind, why) = self.choose(to.info);
        let pair = if self.rank < to.peer_rank {
            self.dial(to, kind, doorbell, &wait)?
        } else {
            self.await_dialer(to, doorbell, &wait)?
        };
        log::debug!(
            "rank {}: comm {} channel {} to rank {}: {} ({why})",
            self.rank,
            to.comm,
            to.channel,
            to.peer_rank,
            pair.kind
        );
        Ok(if self.checksum { checksum::wrap(pair) } else { pair })
    }

    fn dial(&self, to: &ConnectTo<'_>, kind: Kind, bell: &Arc<Doorbell>, wait: &Wait<'_>) -> Result<LinkPair> {
        let ranks = (self.rank, to.peer_rank);
        let hello = Hello::new(self.token, ranks, (to.comm, to.channel), &to.options, self.checksum, self.streams)
            .over_verbs(kind == Kind::Verbs);
        if let (Kind::Shm, Some(name)) = (kind, &to.info.unix) {
            match shm::connect(name, &hello, &to.options, bell, self.single_copy, wait)? {
                shm::Dialed::Linked(pair) => return Ok(pair),
                shm::Dialed::NotPossible(why) if self.transport == TransportChoice::Shm => {
                    let what = format!("shared memory between rank {} and rank {}", self.rank, to.peer_rank);
                    return Err(Error::Unsupported {
                        what,
                        detail: format!("{why}; set TINYNCCL_TRANSPORT=auto or tcp"),
                    });
                }
                shm::Dialed::NotPossible(why) => {
                    log::warn!("rank {}: no shared memory with rank {}, using tcp: {why}", self.rank, to.peer_rank);
                }
            }
        }
        let same_network = self.info.host.same_network(&to.info.host);
        let candidates = order_candidates(&self.locals, &to.info.tcp, same_network);
        if let Some(rails) = &self.rails {
            let (socket, _, who) = tcp::reach(&candidates, &hello, &self.sockets, wait)?;
            let theirs = (&to.info.verbs[..], to.channel);
            return verbs::connect(rails, socket, who, theirs, &to.options, wait, &self.shared.linger);
        }
        tcp::connect(&candidates, &hello, &to.options, &self.sockets, wait, &self.shared.linger)
    }

    fn await_dialer(&self, to: &ConnectTo<'_>, bell: &Arc<Doorbell>, wait: &Wait<'_>) -> Result<LinkPair> {
        let key = Key { comm: to.comm, from: to.peer_rank as u32, channel: to.channel, stream: 0 };
        let ranks = (self.rank, to.peer_rank);
        loop {
            let detail = || {
                let at: Vec<String> = self.info.tcp.iter().map(ToString::to_string).collect();
                format!("it has not connected to us at {}; see its output", at.join(" or "))
            };
            let (hello, mut conn) = self.shared.take(&key, wait, detail)?;
            if let Some(differs) = hello.differs(&to.options, self.checksum, self.streams, self.rails.is_some()) {
                let address = conn.address();
                if let Err(e) = conn.reply(&Reply::Refused(differs.clone())) {
                    log::debug!("rank {}: refusing rank {}: {e}", self.rank, to.peer_rank);
                }
                return Err(Peer { rank: self.rank, peer: to.peer_rank, address }.protocol("connect", differs));
            }
            let result = match conn {
                Conn::Unix(pending) => shm::finish(pending, hello.fence(), ranks, &to.options, bell, self.single_copy),
                Conn::Tcp(pending) => {
                    let welcome = Reply::Welcome(hello.fence());
                    if let Some(rails) = &self.rails {
                        let address = pending.address();
                        let who = Peer { rank: self.rank, peer: to.peer_rank, address };
                        match pending.welcome(&welcome) {
                            Ok(socket) => {
                                return verbs::finish(rails, socket, who, &to.options, wait, &self.shared.linger);
                            }
                            Err(e) => {
                                log::warn!("rank {}: a connection from rank {} failed: {e}", self.rank, to.peer_rank);
                                continue;
                            }
                        }
                    }
                    let mut streams = 1..self.streams;
                    let next = || streams.next().map(|stream| self.await_stream(Key { stream, ..key }, wait));
                    tcp::finish(pending, &welcome, ranks, &to.options, &self.shared.linger, next)?
                }
            };
            match result {
                Ok(pair) => return Ok(pair),
                Err(e) => log::warn!("rank {}: a connection from rank {} failed: {e}", self.rank, to.peer_rank),
            }
        }
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
    /// Without the token: it is a secret, and this may end in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("rank", &self.rank).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("rank {}: the acceptor panicked", self.rank);
        }
    }
}
