//! TCP as an endpoint sees it: it tries to reach every host, and reports which ones it has no route to.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::listen::{self, Port};
use super::{SocketOptions, connect};
use crate::accept::conn::Conn;
use crate::bootstrap::interface::{self, LocalAddress, leads_to, order_candidates};
use crate::fabric::{Accept, Dial, Dialed, Fabric, Site};
use crate::linger::Linger;
use crate::seal::Socket;
use crate::{EndpointInfo, LinkPair, Peer};
use tinynccl_plan::error::{Error, Result};

/// Sockets that listen on the addresses of a rank.
#[derive(Debug)]
pub(crate) struct TcpFabric {
    ports: Vec<Port>,
    sockets: SocketOptions,
    locals: Vec<LocalAddress>,
    streams: usize,
    linger: Arc<Linger>,
}

/// Listens on every address of the site.
///
/// # Errors
/// [`Error::Config`] for a range of ports that are all taken, [`Error::Os`] when nothing can be listened on.
pub(crate) fn bind(site: &Site<'_>) -> Result<Box<dyn Fabric>> {
    Ok(Box::new(TcpFabric::bind(site)?))
}

impl TcpFabric {
    /// As [`bind`].
    pub(crate) fn bind(site: &Site<'_>) -> Result<TcpFabric> {
        let (rank, config) = (site.rank, site.config);
        let sockets = SocketOptions::new(config);
        let mut ports = Vec::new();
        let mut failed = None;
        for local in site.locals {
            match Port::bind(local.ip, config.port_range, &sockets) {
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
        match failed {
            Some(e) if ports.is_empty() => Err(e),
            _ => Ok(TcpFabric {
                ports,
                sockets,
                locals: site.locals.to_vec(),
                streams: config.tcp_streams,
                linger: site.linger.clone(),
            }),
        }
    }

    /// The peer's addresses, the most promising one first, each with why it is. Over an interface that is down by now
    /// none is.
    fn candidates(&self, dial: &Dial<'_>) -> Vec<(SocketAddr, String)> {
        let same_host = dial.ours.host.same_network(&dial.info.host);
        let mut locals = self.locals.clone();
        if let Some(up) = if same_host { None } else { interface::up() } {
            locals.retain(|local| local.loopback || up.contains(&local.ip));
        }
        order_candidates(&locals, &dial.info.tcp, same_host)
    }

    /// A connection to the peer on which it has sent its welcome.
    pub(crate) fn reach(&self, dial: &Dial<'_>) -> Result<(Socket, SocketAddr, Peer)> {
        connect::reach(&self.candidates(dial), dial, &self.sockets)
    }
}

impl Fabric for TcpFabric {
    fn kind(&self) -> &'static str {
        "tcp"
    }

    fn describe(&self, info: &mut EndpointInfo) {
        info.tcp = self.ports.iter().map(|p| p.addr).collect();
    }

    fn reaches(&self, _ours: &EndpointInfo, _theirs: &EndpointInfo) -> Result<&'static str, String> {
        Ok("it reaches every host")
    }

    fn leads_to(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> bool {
        leads_to(&self.locals, &theirs.tcp, ours.host.same_network(&theirs.host))
    }

    fn streams(&self) -> usize {
        self.streams
    }

    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed> {
        let first = self.reach(dial)?;
        connect::connect(first, dial, &self.sockets, &self.linger).map(Dialed::Linked)
    }

    fn listeners(&self) -> Vec<BorrowedFd<'_>> {
        self.ports.iter().map(|p| p.as_fd()).collect()
    }

    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>> {
        for port in &self.ports {
            if let Some(conn) = listen::incoming(port)? {
                return Ok(Some(Box::new(conn)));
            }
        }
        Ok(None)
    }

    fn accept(&self, conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>> {
        listen::finish(conn, accept, self.streams, &self.linger)
    }
}
