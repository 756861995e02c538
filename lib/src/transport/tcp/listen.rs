//! The accepting side: a port per address, and connections that have not said who they are.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use socket2::{Domain, SockRef, Socket, Type};

use super::{SocketOptions, describe, pair};
use crate::error::{Error, Result};
use crate::transport::handshake::{Hello, Reply};
use crate::transport::linger::Linger;
use crate::transport::{LinkOptions, LinkPair, Peer};

/// A listening socket on one address, with a port that the kernel chose.
#[derive(Debug)]
pub(crate) struct Port {
    listener: TcpListener,
    pub(crate) addr: SocketAddr,
    sockets: SocketOptions,
}

impl Port {
    pub(crate) fn bind(ip: IpAddr, sockets: &SocketOptions) -> Result<Port> {
        let bind = || {
            let addr = SocketAddr::new(ip, 0);
            let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            if ip.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            sockets.listening(&SockRef::from(&socket));
            socket.bind(&addr.into())?;
            socket.listen(1024)?;
            let listener = TcpListener::from(socket);
            let addr = listener.local_addr()?;
            Ok(Port { listener, addr, sockets: sockets.clone() })
        };
        bind().map_err(|e| Error::io("listen", format!("on {ip}"), &e))
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
            Ok(Some(Pending { socket, from, bytes: [0; Hello::BYTES], got: 0 }))
        }
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// A connection whose [`Hello`] has not come whole, or not been answered.
#[derive(Debug)]
pub(crate) struct Pending {
    socket: TcpStream,
    from: SocketAddr,
    bytes: [u8; Hello::BYTES],
    got: usize,
}

impl Pending {
    /// Reads what has come: the hello's bytes once they are all there, an error when no more will come.
    pub(crate) fn read(&mut self) -> Result<Option<[u8; Hello::BYTES]>, String> {
        while let Some(rest) = self.bytes.get_mut(self.got..).filter(|r| !r.is_empty()) {
            match self.socket.read(rest) {
                Ok(0) => return Err(format!("closed after {} bytes", self.got)),
                Ok(n) => self.got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
        Ok(Some(self.bytes))
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
        Ok(self.socket)
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
        sockets.push(pending.socket);
        pending = match next() {
            Some(further) => further?,
            None => return Ok(pair(sockets, peer, options, linger).map_err(|e| e.to_string())),
        };
    }
}
