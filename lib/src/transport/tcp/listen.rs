//! The accepting side: a port per address, and connections that have not said who they are.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use socket2::{Domain, SockRef, Socket, Type};

use super::{SocketOptions, describe, pair};
use crate::config::PortRange;
use crate::error::{Error, Result};
use crate::fork::Kept;
use crate::secret::Proof;
use crate::transport::handshake::{Hello, Reply};
use crate::transport::linger::Linger;
use crate::transport::{LinkOptions, LinkPair, Peer};

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
            let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
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
        Err(Error::Config {
            name: "TINYNCCL_PORT_RANGE".to_owned(),
            value: range.to_string(),
            detail: format!(
                "all {} of these ports are taken on {ip}: expected a free one for every rank of this host; end what listens there, \
                 or widen the range",
                range.ports().count()
            ),
        })
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// The next connection, if there is one.
pub(crate) fn accept(port: &Port) -> std::io::Result<Option<Pending>> {
    match port.listener.accept() {
        Ok((socket, from)) => {
            socket.set_nonblocking(true)?;
            // Not inherited on every kernel.
            socket.set_nodelay(true)?;
            port.sockets.accepted(&socket);
            let socket = Kept::new(socket);
            Ok(Some(Pending { socket, from, bytes: [0; Hello::BYTES], got: 0 }))
        }
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// A connection whose [`Hello`] or proof has not come whole, or not been answered.
#[derive(Debug)]
pub(crate) struct Pending {
    socket: Kept<TcpStream>,
    from: SocketAddr,
    bytes: [u8; Hello::BYTES],
    got: usize,
}

impl Pending {
    /// The hello's bytes once they are all there, an error when no more will come.
    pub(crate) fn hello(&mut self) -> Result<Option<[u8; Hello::BYTES]>, String> {
        self.read()
    }

    /// The proof, in the same way.
    pub(crate) fn proof(&mut self) -> Result<Option<Proof>, String> {
        self.read()
    }

    fn read<const N: usize>(&mut self) -> Result<Option<[u8; N]>, String> {
        while let Some(rest) = self.bytes.get_mut(self.got..N).filter(|r| !r.is_empty()) {
            match self.socket.read(rest) {
                Ok(0) => return Err(format!("closed after {} bytes", self.got)),
                Ok(n) => self.got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
        self.got = 0;
        Ok(self.bytes.first_chunk().copied())
    }

    /// Answers. A new connection's send buffer has room for it.
    pub(crate) fn reply(&mut self, reply: &Reply) -> Result<(), String> {
        self.socket.write_all(&reply.to_bytes()).map_err(|e| e.to_string())
    }

    pub(crate) fn address(&self) -> String {
        describe(self.from)
    }

    /// Answers that the link stands: the connection.
    pub(crate) fn welcome(mut self, welcome: &Reply) -> Result<TcpStream, String> {
        self.reply(welcome)?;
        Ok(self.socket.into_inner())
    }

    /// The dialer has gone away in the meantime.
    pub(crate) fn is_gone(&self) -> bool {
        !matches!(self.socket.peek(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock)
    }
}

impl AsFd for Pending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Answers that the link stands, and makes it. `next` waits for the connection of each further stream.
pub(crate) fn finish(
    mut pending: Pending,
    welcome: &Reply,
    (rank, peer): (usize, usize),
    options: &LinkOptions,
    linger: &Arc<Linger>,
    mut next: impl FnMut() -> Option<Result<Pending>>,
) -> Result<Result<LinkPair, String>> {
    let peer = Peer { rank, peer, address: pending.address() };
    let mut sockets = Vec::new();
    loop {
        if let Err(detail) = pending.reply(welcome) {
            return Ok(Err(detail));
        }
        sockets.push(pending.socket.into_inner());
        pending = match next() {
            Some(further) => further?,
            None => return Ok(pair(sockets, peer, options, linger).map_err(|e| e.to_string())),
        };
    }
}
