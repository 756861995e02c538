//! The accepting side: a port per address.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use socket2::{Domain, SockRef, Type};

use super::{SocketOptions, describe, pair};
use crate::LinkPair;
use crate::accept::conn::Conn;
use crate::accept::stream::StreamConn;
use crate::fabric::Accept;
use crate::linger::Linger;
use crate::seal::Socket;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::PortRange;
use tinynccl_sys::fork::Kept;

/// A listening socket on one address.
#[derive(Debug)]
pub(crate) struct Port {
    listener: Kept<TcpListener>,
    pub(crate) addr: SocketAddr,
    sockets: SocketOptions,
}

impl Port {
    /// Listens on `ip`: at the first free port of `range`, or at one that the kernel chooses.
    ///
    /// # Errors
    /// [`Error::Config`] when all ports of the range are taken, [`Error::Os`] for anything else.
    pub(crate) fn bind(ip: IpAddr, range: Option<PortRange>, sockets: &SocketOptions) -> Result<Port> {
        let bind = |port: u16| {
            let addr = SocketAddr::new(ip, port);
            let socket = socket2::Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            if ip.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            sockets.listening(&SockRef::from(&socket));
            // Connections of a rank that listened there before may still be in the kernel. It does not let two listen.
            socket.set_reuse_address(port != 0)?;
            socket.bind(&addr.into())?;
            socket.listen(1024)?;
            let listener = TcpListener::from(socket);
            let addr = listener.local_addr()?;
            Ok(Port { listener: Kept::new(listener), addr, sockets: sockets.clone() })
        };
        let failed = |e: std::io::Error| Error::io("listen", format!("on {ip}"), &e);
        let Some(range) = range else { return bind(0).map_err(failed) };
        for port in range.ports() {
            match bind(port) {
                Err(e) if e.kind() == ErrorKind::AddrInUse => {}
                other => return other.map_err(failed),
            }
        }
        let detail = format!(
            "all {} of these ports are taken on {ip}: expected a free one for every rank of this host; end what listens there, \
             or widen the range",
            range.ports().count()
        );
        Err(Error::config("TINYNCCL_PORT_RANGE", range, detail))
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// The next connection, if there is one.
pub(crate) fn incoming(port: &Port) -> std::io::Result<Option<StreamConn<Socket>>> {
    match port.listener.accept() {
        Ok((socket, from)) => {
            socket.set_nonblocking(true)?;
            // Not inherited on every kernel.
            socket.set_nodelay(true)?;
            port.sockets.accepted(&socket);
            Ok(Some(StreamConn::new(Socket::new(socket, port.sockets.encrypt), describe(from))))
        }
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// Answers that the link stands, and makes it of as many connections as it has streams.
pub(super) fn finish(
    mut conn: Box<dyn Conn>,
    accept: &Accept<'_>,
    streams: usize,
    linger: &Arc<Linger>,
) -> Result<Result<LinkPair, String>> {
    let peer = accept.peer(conn.address());
    let mut sockets = Vec::new();
    loop {
        match welcome(conn, accept) {
            Ok(socket) => sockets.push(socket),
            Err(detail) => return Ok(Err(detail)),
        }
        if sockets.len() == streams {
            return Ok(pair(sockets, peer, accept.options, linger).map_err(|e| e.to_string()));
        }
        conn = accept.further(sockets.len())?;
    }
}

/// Answers that the link stands: the connection.
pub(crate) fn welcome(mut conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Socket, String> {
    accept.welcome(&mut *conn)?;
    Ok(conn.downcast::<StreamConn<Socket>>()?.into_inner())
}
