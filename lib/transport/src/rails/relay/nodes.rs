//! Discovery of nodes: queries to neighbours, and replies.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::LISTENER;
use super::routes::{MOST, routes};
use crate::bootstrap::interface::{LocalAddress, in_subnet};
use crate::rails::address::handle::Handle;
use crate::rails::address::ports::Route;
use crate::wait::Wait;
use tinynccl_plan::error::Result;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::secret::{self, Nonce, Proof, Secret};
use tinynccl_sys::threads::lock;

const MAGIC: [u8; 8] = *b"tnode\0\0\x01";
const QUERY: u32 = 1;
const REPLY: u32 = 2;

/// Longest search for a path. When NCCL connects, all ranks have loaded the plugin before.
const SEARCH: Duration = Duration::from_secs(5);
/// Time before the next query, at first and at most: a datagram may be lost.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(800));
/// Time to wait after a path is known, for nodes that give others of the same length.
const SETTLE: Duration = Duration::from_millis(50);
/// Most queries for the addresses of a host that its handle has no room for: a datagram may be lost, and the host may
/// be no neighbour.
const ADDRESS_QUERIES: u32 = 4;
/// Time for which a node's reply counts.
const FRESH: Duration = Duration::from_secs(60);
/// Time for which replies to a query are passed on.
const OPEN: Duration = Duration::from_secs(2);
/// Most queries that are open at once; `MAX_KNOWN`: most processes that are known.
const MAX_QUERIES: usize = 1024;
const MAX_KNOWN: usize = 4096;
/// Datagrams that are read from a socket before the other sockets are.
const TURN: usize = 256;

/// A query or a reply between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Datagram {
    magic: [u8; 8],
    /// Identifier of the query; its replies have the same one.
    id: Nonce,
    kind: u32,
    /// Number of times that a query is still passed on; 0 in a reply.
    hops: u32,
    /// The acceptor of the process that queries or replies: a handle of the listener that relays, without a secret.
    node: [u8; Handle::BYTES],
    proof: Proof,
}

impl Datagram {
    fn new(key: &Secret, id: Nonce, kind: u32, hops: u32, node: &Handle) -> Datagram {
        let mut datagram = Datagram { magic: MAGIC, id, kind, hops, node: node.to_bytes(), proof: [0; 32] };
        datagram.proof = key.prove("node", &[datagram.before_proof()]);
        datagram
    }

    fn before_proof(&self) -> &[u8] {
        let all = bytemuck::bytes_of(self);
        all.get(..all.len() - size_of::<Proof>()).unwrap_or_default()
    }

    /// Decodes a datagram, and the node that it names; `None` if it is malformed, or its proof is wrong.
    fn parse(key: &Secret, bytes: &[u8]) -> Option<(Datagram, Handle)> {
        let datagram: Datagram = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        let known = datagram.magic == MAGIC && matches!(datagram.kind, QUERY | REPLY) && datagram.hops < MOST as u32;
        let proven = known && key.accepts(&datagram.proof, "node", &[datagram.before_proof()]);
        let node = Handle::parse(&datagram.node).ok().filter(|_| proven)?;
        (node.listener == LISTENER).then_some((datagram, node))
    }
}

/// A port: from its address this process queries and replies, and what comes back arrives there.
#[derive(Debug)]
struct QuerySocket {
    socket: Kept<UdpSocket>,
    port: LocalAddress,
    /// All hosts of the subnet.
    group: SocketAddr,
}

impl QuerySocket {
    fn open(port: &LocalAddress, udp: u16) -> std::io::Result<QuerySocket> {
        let socket = UdpSocket::bind(SocketAddr::new(port.ip, 0))?;
        socket.set_nonblocking(true)?;
        // The kernel sends to a group from the interface that has the socket's address.
        let group = match port.ip {
            IpAddr::V4(_) => {
                socket.set_multicast_loop_v4(false)?;
                SocketAddr::new(Ipv4Addr::new(224, 0, 0, 1).into(), udp)
            }
            IpAddr::V6(_) => {
                socket.set_multicast_loop_v6(false)?;
                let index = rustix::net::netdevice::name_to_index(&socket, &port.interface)?;
                SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), udp, 0, index).into()
            }
        };
        Ok(QuerySocket { socket: Kept::new(socket), port: port.clone(), group })
    }

    fn send(&self, datagram: &Datagram, to: SocketAddr) {
        if let Err(e) = self.socket.send_to(bytemuck::bytes_of(datagram), to) {
            log::debug!("net: querying nodes at {to} from {}: {e}", self.port.interface);
        }
    }
}

/// Opens a socket at which multicast queries arrive: all processes of a host receive them.
fn open_multicast(any: IpAddr, udp: u16) -> std::io::Result<Kept<UdpSocket>> {
    let address = SocketAddr::new(any, udp);
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    if any.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(Kept::new(socket.into()))
}

/// A query that is open.
#[derive(Debug)]
struct Query {
    /// Index of the port at which it came, and its sender; `None` if it is ours.
    from: Option<(usize, SocketAddr)>,
    until: Instant,
}

#[derive(Debug, Default)]
struct State {
    /// Handles of the known processes, encoded, with the time of the last reply of each.
    known: HashMap<[u8; Handle::BYTES], Instant>,
    open: HashMap<Nonce, Query>,
}

impl State {
    /// Adds a query; false when there are too many, or it is known.
    fn open(&mut self, id: Nonce, from: Option<(usize, SocketAddr)>, now: Instant) -> bool {
        self.open.retain(|_, query| now < query.until);
        if self.open.len() >= MAX_QUERIES || self.open.contains_key(&id) {
            return false;
        }
        self.open.insert(id, Query { from, until: now + if from.is_some() { OPEN } else { SEARCH } });
        true
    }
}

/// Discovery state of a process: its sockets for queries, and the processes that it knows.
#[derive(Debug)]
pub(in crate::rails) struct Nodes {
    key: Secret,
    host: u64,
    multicast: Vec<Kept<UdpSocket>>,
    sockets: Vec<QuerySocket>,
    /// This process's own acceptor, once it is open: with all addresses, and in as many parts as datagrams need for
    /// them.
    own: OnceLock<(Handle, Vec<Handle>)>,
    state: Mutex<State>,
    changed: Condvar,
    /// Count of searches, by which the processes of a relay are used in turn.
    turn: AtomicUsize,
}

impl Nodes {
    /// Opens the sockets. Without a port for datagrams (`udp` is 0), or where sockets cannot be made, no node is found.
    pub(super) fn open(udp: u16, ports: &[LocalAddress], host: u64, key: Secret) -> Nodes {
        let (mut multicast, mut sockets) = (Vec::new(), Vec::new());
        let outside = || ports.iter().filter(|port| !port.loopback);
        let without = |what: String, e: std::io::Error| {
            log::warn!("net: finds no relays over {what}: {e} (TINYNCCL_NET_RELAY_PORT is {udp}, 0 does without)");
        };
        for any in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
            if udp == 0 || !outside().any(|port| port.ip.is_ipv4() == any.is_ipv4()) {
                continue;
            }
            match open_multicast(any, udp) {
                Ok(socket) => multicast.push(socket),
                Err(e) => {
                    without(format!("[{any}]:{udp}"), e);
                    continue;
                }
            }
            for port in outside().filter(|port| port.ip.is_ipv4() == any.is_ipv4()) {
                match QuerySocket::open(port, udp) {
                    Ok(socket) => sockets.push(socket),
                    Err(e) => without(port.interface.clone(), e),
                }
            }
        }
        Nodes {
            key,
            host,
            multicast,
            sockets,
            own: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
            turn: AtomicUsize::new(0),
        }
    }

    /// Sets the acceptor at which this process relays; from now on it replies to queries.
    pub(in crate::rails) fn announce(&self, ports: (u16, u16), ours: &[LocalAddress]) {
        let outside: Vec<LocalAddress> = ours.iter().filter(|port| !port.loopback).cloned().collect();
        let parts = Handle::parts(self.host, LISTENER, ports, &outside);
        let Some(mut whole) = parts.first().cloned() else { return };
        parts.iter().for_each(|part| whole.merge(part));
        let _ = self.own.set((whole, parts));
    }

    /// Readable when [`Nodes::handle_datagrams`] has something to do.
    pub(in crate::rails) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.multicast.iter().map(AsFd::as_fd).chain(self.sockets.iter().map(|socket| socket.socket.as_fd()))
    }

    /// Replies to queries, and passes queries and replies on.
    pub(in crate::rails) fn handle_datagrams(&self) {
        let mut bytes = [0; size_of::<Datagram>() + 1];
        let sockets = self.multicast.iter().chain(self.sockets.iter().map(|socket| &socket.socket));
        for socket in sockets {
            for _ in 0..TURN {
                // An error of a port that went away is read with it.
                let Ok((len, from)) = socket.recv_from(&mut bytes) else { break };
                let came = Datagram::parse(&self.key, bytes.get(..len).unwrap_or_default());
                match came {
                    Some((datagram, node)) if datagram.kind == QUERY => self.handle_query(&datagram, &node, from),
                    Some((datagram, _)) => self.handle_reply(&datagram),
                    None => log::debug!("net: {from} sent an unknown datagram, or does not know this job's secret"),
                }
            }
        }
    }

    /// Handles a query.
    fn handle_query(&self, query: &Datagram, asker: &Handle, from: SocketAddr) {
        let near = |m: &QuerySocket| in_subnet(m.port.ip, m.port.prefix, from.ip()) && m.port.ip != from.ip();
        let Some((_, parts)) = self.own.get().filter(|_| asker.host != self.host) else { return };
        // Networks that are not for data receive queries, too.
        let Some((at, socket)) = self.sockets.iter().enumerate().find(|(_, socket)| near(socket)) else { return };
        if !lock(&self.state).open(query.id, Some((at, from)), Instant::now()) {
            return;
        }
        for own in parts {
            socket.send(&Datagram::new(&self.key, query.id, REPLY, 0, own), from);
        }
        if let Some(hops) = query.hops.checked_sub(1) {
            let on = Datagram::new(&self.key, query.id, QUERY, hops, asker);
            let others = self.sockets.iter().enumerate().filter(|(other, _)| *other != at);
            others.for_each(|(_, socket)| socket.send(&on, socket.group));
        }
    }

    /// Handles a reply, for us or for the node that queried.
    fn handle_reply(&self, reply: &Datagram) {
        let mut state = lock(&self.state);
        match state.open.get(&reply.id).map(|query| query.from) {
            Some(Some((at, asker))) => {
                drop(state);
                if let Some(socket) = self.sockets.get(at) {
                    socket.send(reply, asker);
                }
            }
            Some(None) if state.known.len() < MAX_KNOWN || state.known.contains_key(&reply.node) => {
                state.known.insert(reply.node, Instant::now());
                self.changed.notify_all();
            }
            _ => {}
        }
    }

    /// Forgets all replies, as a path did not work.
    pub(in crate::rails) fn forget(&self) {
        lock(&self.state).known.clear();
    }

    /// Returns the paths to a listener on another node through others; none if none is found in time.
    pub(in crate::rails) fn routes(&self, target: &Handle, wait: &Wait<'_>) -> Result<Vec<Route>> {
        let Some((own, _)) = self.own.get().filter(|_| !self.sockets.is_empty() && target.host != self.host) else {
            return Ok(Vec::new());
        };
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let limit = Instant::now() + SEARCH.min(wait.left());
        let mut hops = 0;
        let mut pause = AGAIN.0;
        loop {
            let routes = self.known_routes(own, target, turn);
            if !routes.is_empty() || Instant::now() >= limit {
                return Ok(routes);
            }
            self.query(hops)?;
            let again = Instant::now() + pause;
            while Instant::now() < again.min(limit) && self.known_routes(own, target, turn).is_empty() {
                let Ok(slice) = wait.slice(String::new) else { return Ok(Vec::new()) };
                let state = lock(&self.state);
                drop(self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner));
            }
            if !self.known_routes(own, target, turn).is_empty() {
                // The deadline is checked where the path is taken.
                let _ = wait.pause(SETTLE, String::new);
            }
            // The nearest nodes have replied first.
            hops = (hops + 1).min(MOST as u32 - 1);
            pause = (2 * pause).min(AGAIN.1);
        }
    }

    /// Sends a query to the nodes that have up to `hops` others between.
    fn query(&self, hops: u32) -> Result<()> {
        let Some(own) = self.own.get().and_then(|(_, parts)| parts.first()) else { return Ok(()) };
        let id = secret::random()?;
        lock(&self.state).open(id, None, Instant::now());
        let query = Datagram::new(&self.key, id, QUERY, hops, own);
        self.sockets.iter().for_each(|socket| socket.send(&query, socket.group));
        Ok(())
    }

    /// Returns the handle with the addresses, too, for which it had no room, if its host is a neighbour.
    pub(in crate::rails) fn complete(&self, target: &Handle, wait: &Wait<'_>) -> Result<Handle> {
        let mut whole = target.clone();
        if !target.more || target.host == self.host {
            return Ok(whole);
        }
        for _ in 0..ADDRESS_QUERIES {
            self.query(0)?;
            // The deadline is checked where the addresses are dialed.
            let _ = wait.pause(SETTLE, String::new);
            whole = completed(&whole, &self.known());
            if whole.addresses.len() > target.addresses.len() {
                break;
            }
        }
        Ok(whole)
    }

    fn known_routes(&self, own: &Handle, target: &Handle, turn: usize) -> Vec<Route> {
        let nodes = self.known();
        routes(own, &completed(target, &nodes), &nodes, turn)
    }

    /// Returns the processes that have replied, each with all of its addresses.
    fn known(&self) -> Vec<Handle> {
        let now = Instant::now();
        let mut parts: Vec<Handle> = {
            let mut state = lock(&self.state);
            state.known.retain(|_, at| now.saturating_duration_since(*at) < FRESH);
            state.known.keys().filter_map(|text| Handle::parse(text).ok()).collect()
        };
        parts.sort_by_key(|node| (node.host, node.ports, node.addresses.first().map(|address| address.ip)));
        let mut nodes: Vec<Handle> = Vec::new();
        for part in parts {
            match nodes.last_mut().filter(|last| (last.host, last.ports) == (part.host, part.ports)) {
                Some(last) => last.merge(&part),
                None => nodes.push(part),
            }
        }
        nodes
    }

    /// Returns the nodes that have replied, as text.
    pub(in crate::rails) fn known_text(&self) -> String {
        let text = |node: &Handle| crate::rails::address::ports::list_remote(&node.addresses);
        let mut all: Vec<String> = self.known().iter().map(text).collect();
        all.sort();
        all.dedup();
        if all.is_empty() { "none".to_owned() } else { all.join("; ") }
    }
}

/// Returns the handle with the addresses, too, that processes of its host have sent.
fn completed(target: &Handle, nodes: &[Handle]) -> Handle {
    let mut whole = target.clone();
    nodes.iter().filter(|node| node.host == target.host).for_each(|node| whole.merge(node));
    whole
}

#[cfg(test)]
mod tests {
    use super::super::routes::tests::node;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_whoever_has_the_secret_is_heard() {
        let (key, other) = (Secret::new([1; 32]), Secret::new([2; 32]));
        let datagram = Datagram::new(&key, [3; 16], QUERY, 2, &node(1, &["10.0.0.1"]));
        let bytes = bytemuck::bytes_of(&datagram);
        assert_eq!(Datagram::parse(&key, bytes), Some((datagram, node(1, &["10.0.0.1"]))));
        assert_eq!(Datagram::parse(&other, bytes), None);
        assert_eq!(Datagram::parse(&key, &bytes[1..]), None);
        let far = Datagram::new(&key, [3; 16], QUERY, MOST as u32, &node(1, &[]));
        assert_eq!(Datagram::parse(&key, bytemuck::bytes_of(&far)), None, "passed on too often");
    }

    #[test]
    fn open_questions_are_bounded_and_known_ones_are_not_passed_on_again() {
        let (mut state, now) = (State::default(), Instant::now());
        let id = |n: usize| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&n.to_le_bytes());
            id
        };
        assert!((0..MAX_QUERIES).all(|n| state.open(id(n), Some((0, "10.0.0.1:1".parse().unwrap())), now)));
        assert!(!state.open(id(MAX_QUERIES), None, now), "no room");
        assert!(state.open(id(MAX_QUERIES), None, now + OPEN), "they are answered or forgotten");
        assert!(!state.open(id(MAX_QUERIES), None, now + OPEN), "known");
    }

    proptest! {
        #[test]
        fn any_datagram_is_parsed_or_dropped(
            bytes in proptest::collection::vec(any::<u8>(), 0..256),
            at in 0usize..192,
            flip: u8,
        ) {
            let key = Secret::new([1; 32]);
            prop_assert!(Datagram::parse(&key, &bytes).is_none());
            let datagram = Datagram::new(&key, [3; 16], REPLY, 0, &node(1, &["10.0.0.1"]));
            let mut bytes = bytemuck::bytes_of(&datagram).to_vec();
            bytes[at] ^= flip;
            prop_assert_eq!(Datagram::parse(&key, &bytes).is_some(), flip == 0);
        }
    }
}
