//! RDMA as an endpoint sees it: reaches ranks with a port on a common subnet. The handshake goes over TCP.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::nics::Nics;
use super::sys::Access;
use super::{connect, listen};
use crate::accept::conn::Conn;
use crate::fabric::{Accept, Dial, Dialed, Fabric, Registration, Site};
use crate::linger::Linger;
use crate::tcp::fabric::TcpFabric;
use crate::{EndpointInfo, LinkPair, tcp};
use tinynccl_plan::error::Result;

/// The ports of RDMA devices, and the sockets over which links are agreed on.
#[derive(Debug)]
struct VerbsFabric {
    nics: Nics,
    tcp: TcpFabric,
    streams: usize,
    linger: Arc<Linger>,
}

/// Opens the devices, and listens with TCP.
///
/// # Errors
/// [`Error::Unsupported`](tinynccl_plan::Error::Unsupported) when there is no device that can be used, and those of
/// TCP.
pub(crate) fn bind(site: &Site<'_>) -> Result<Box<dyn Fabric>> {
    Ok(Box::new(VerbsFabric {
        nics: Nics::open(site.rank, site.config)?,
        tcp: TcpFabric::bind(site)?,
        streams: site.config.verbs_qps,
        linger: site.linger.clone(),
    }))
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> &'static str {
        "verbs"
    }

    fn name(&self) -> &'static str {
        "RDMA"
    }

    fn describe(&self, info: &mut EndpointInfo) {
        self.tcp.describe(info);
        info.verbs = self.nics.addresses();
    }

    fn reaches(&self, _ours: &EndpointInfo, theirs: &EndpointInfo) -> Result<&'static str, String> {
        self.nics.port_pairs(&theirs.verbs, 0).map(|_| "they have ports on a common subnet")
    }

    fn streams(&self) -> usize {
        self.streams
    }

    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed> {
        let (socket, _, who) = self.tcp.reach(dial)?;
        let socket = socket.into_plain();
        connect::connect(&self.nics, socket, who, dial, &self.linger).map(Dialed::Linked)
    }

    fn listeners(&self) -> Vec<BorrowedFd<'_>> {
        self.tcp.listeners().into_iter().chain(self.nics.event_fds()).collect()
    }

    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>> {
        self.tcp.incoming()
    }

    fn accept(&self, conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>> {
        let who = accept.peer(conn.address());
        match tcp::listen::welcome(conn, accept) {
            Ok(socket) => listen::finish(&self.nics, socket.into_plain(), who, accept, &self.linger),
            Err(e) => Ok(Err(e)),
        }
    }

    fn handle_events(&self) {
        self.nics.handle_events();
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<Registration>> {
        // SAFETY: by the caller.
        unsafe { self.nics.register(base, bytes, Access::Source) }.map(|memory| Some(Registration::new(memory)))
    }
}
