//! Connections between nodes that have no subnet in common, through one to three nodes that have.
//!
//! # Design
//! - **Discovery.** A handle names the listener's addresses and no other node's. So a node without a path queries its
//!   neighbours (`nodes.rs`): one datagram to the group of all hosts (224.0.0.1, ff02::1) on each of its ports, which a
//!   kernel takes without joining anything. Every process with this library replies with the addresses of its acceptor,
//!   and queries its own neighbours in turn, as far as the query's count of hops allows. Nothing is sent before a node
//!   needs it, nothing has to be configured, and no process has to know of the others beforehand.
//! - **Routing.** The querying node draws the graph "share a subnet" of all that replied, and takes the route that
//!   [`Routes`](crate::relay::Routes) gives: the shortest one, the lowest addresses among equals, as between
//!   ranks of this library. The nodes are numbered by their lowest addresses, so all compute the same one. Streams go
//!   in turn (`routes.rs`) over this one and over others of its length that have no relay in common with it.
//! - **Relayed streams.** A connection per hop (`hop.rs`). The dialer shakes hands with the first relay's acceptor, and
//!   names the acceptors that follow behind its proof; the relay dials the next one, and sends its welcome when that
//!   has. From there on dialer and listener shake hands as they always do.
//! - **Data.** One thread of each relay, for all streams (`forwarder.rs`). It copies bytes as they come (cut-through),
//!   and holds at most one buffer of each direction that the next hop has not taken: a slow receiver stops the sender.
//! - **Access control.** A relay requires the proof of `TINYNCCL_SECRET`, if the job has one, in datagrams and at its
//!   acceptor. It serves and dials only addresses in subnets of its own ports. It lets through a handshake, of known
//!   lengths, and anything else after a listener of this library has sent a welcome to a dialer that knows the handle.
//!   Relayed streams, those in the making and datagrams under way are bounded in number, and those in the making in
//!   time.
//! - **Ends.** The end of a hop, or its failure, is passed to the other one: a half that is closed closes that half
//!   there, what broke is reset there. The ends know their relays, and name them in their errors.
//! - **Failover.** Several paths are rails: what a lost one had goes over the others (`health`).
//! - **Shutdown.** [`Net`](super::Net) waits when it is dropped until the streams that it relays are over, at most
//!   until nothing has passed for [`Config::timeout`](tinynccl_sys::Config::timeout).

mod forwarder;
mod hop;
mod nodes;
mod routes;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::Duration;

use crate::bootstrap::interface::LocalAddress;
use crate::bootstrap::job_secret;
use crate::rails::address::handle::Handle;
use crate::relay::Setups;
use crate::tcp::SocketOptions;
use forwarder::Forwarder;
use nodes::Nodes;
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;

pub(super) use hop::{RelayRequest, SourceRoute, start, through};
pub(super) use routes::relays_text;

/// Number that no listener has: the one in the handle of a node.
pub(super) const LISTENER: u32 = 0;
/// Longest time for making the rest of a stream's route.
const LIMIT: Duration = Duration::from_secs(10);

/// Relay state of a process: for streams of others, and for its own streams through others.
#[derive(Debug)]
pub(super) struct Relays {
    pub(super) key: Secret,
    pub(super) nodes: Nodes,
    ports: Vec<LocalAddress>,
    sockets: SocketOptions,
    /// Longest time for making the rest of a stream's route.
    limit: Duration,
    /// Time after which streams that carry nothing do not hold up the end of this process.
    patience: Duration,
    setups: Setups<Forwarder>,
}

impl Relays {
    pub(super) fn new(config: &Config, ports: &[LocalAddress], sockets: &SocketOptions, host: u64) -> Result<Relays> {
        let key = job_secret(&Secret::new([0; 32]), config)?.derive("net relay", &[]);
        Ok(Relays {
            key,
            nodes: Nodes::open(config.net_relay_port as u16, ports, host, key),
            ports: ports.to_vec(),
            sockets: sockets.clone(),
            limit: LIMIT.min(config.connect_timeout),
            patience: config.timeout,
            setups: Setups::new(),
        })
    }

    /// Ends the streams being made, and waits for the rest as long as the peers may need it.
    pub(super) fn shut_down(&self) {
        self.setups.stop();
    }
}

/// Adds a stream's path to its connection's: the far end once, then all relays.
pub(super) fn add_route<'a>(routes: &mut Vec<SocketAddr>, route: impl IntoIterator<Item = &'a SocketAddr>) {
    for (index, stop) in route.into_iter().enumerate() {
        if if index == 0 { routes.is_empty() } else { !routes.contains(stop) } {
            routes.push(*stop);
        }
    }
}

/// Returns the acceptors on the path to a listener, the nearest first.
pub(super) fn acceptors(relays: &[SocketAddr], handle: &Handle, to: std::net::IpAddr) -> Vec<SocketAddr> {
    relays.iter().copied().chain([handle.acceptor_at(to)]).collect()
}
