//! Rails as a fabric of an endpoint: they reach every host, as TCP does.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::connect;
use crate::conn::Conn;
use crate::fabric::{Accept, Dial, Dialed, Fabric, Site};
use crate::linger::Linger;
use crate::rails::Net;
use crate::tcp::fabric::TcpFabric;
use crate::{EndpointInfo, LinkPair, tcp};
use tinynccl_plan::error::{Error, Result};

/// The endpoint's network, and the sockets over which links are agreed on.
#[derive(Debug)]
struct RailsFabric {
    net: Arc<Net>,
    tcp: TcpFabric,
    linger: Arc<Linger>,
}

/// Starts the network, and listens with TCP.
///
/// # Errors
/// Errors of [`Net::new`] and of listening with TCP.
pub(super) fn bind(site: &Site<'_>) -> Result<Box<dyn Fabric>> {
    // Ranks that wait drive progress inline: one thread is enough for the rest. Paths through other ranks are the
    // endpoint's.
    let net_threads = site.config.net_threads.max(1);
    let config = site.config.clone().with(|c| (c.net_relay_port, c.net_threads) = (0, net_threads));
    let net = Arc::new(Net::new(&config)?);
    Ok(Box::new(RailsFabric { net, tcp: TcpFabric::bind(site)?, linger: site.linger.clone() }))
}

impl Fabric for RailsFabric {
    fn kind(&self) -> &'static str {
        "rails"
    }

    fn describe(&self, info: &mut EndpointInfo) {
        self.tcp.describe(info);
    }

    fn reaches(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> Result<&'static str, String> {
        self.tcp.reaches(ours, theirs)
    }

    fn leads_to(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> bool {
        self.tcp.leads_to(ours, theirs)
    }

    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed> {
        let (socket, _, who) = self.tcp.reach(dial)?;
        connect::join(&self.net, socket, who, (dial.options, dial.bell, dial.wait), &self.linger).map(Dialed::Linked)
    }

    fn listeners(&self) -> Vec<BorrowedFd<'_>> {
        self.tcp.listeners()
    }

    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>> {
        self.tcp.incoming()
    }

    fn accept(&self, conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>> {
        let who = accept.peer(conn.address());
        let socket = match tcp::listen::welcome(conn, accept) {
            Ok(socket) => socket,
            Err(e) => return Ok(Err(e)),
        };
        match connect::join(&self.net, socket, who, (accept.options, accept.bell, accept.wait), &self.linger) {
            // It has stopped, and may come again.
            Err(e @ Error::PeerLost { .. }) => Ok(Err(e.to_string())),
            made => made.map(Ok),
        }
    }
}
