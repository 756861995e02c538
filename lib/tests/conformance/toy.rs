//! A transport that is written by following "Adding a transport" in CONTRIBUTING.md, but for the steps that make it a
//! choice of the library's users: one TCP connection per link over loopback. The halves of its links are those of
//! milestone 06 (`link.rs`), which a learner writes, so this suite runs over them too. It is for tests only.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use tinynccl::error::{Error, Result};
use tinynccl::transport::{Accept, Conn, Dial, Dialed, EndpointInfo, Fabric, LinkPair, StreamConn};

use crate::link;

/// fabric.rs, listen.rs, connect.rs: a port of loopback.
#[derive(Debug)]
pub(crate) struct Toy(TcpListener);

impl Toy {
    pub(crate) fn bind() -> Toy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Toy(listener)
    }
}

fn os(error: std::io::Error) -> Error {
    Error::invalid("toy", error.to_string())
}

impl Fabric for Toy {
    fn kind(&self) -> &'static str {
        "toy"
    }
    fn describe(&self, info: &mut EndpointInfo) {
        info.other.insert("toy".to_owned(), self.0.local_addr().unwrap().to_string());
    }
    fn reaches(&self, ours: &EndpointInfo, theirs: &EndpointInfo) -> Result<&'static str, String> {
        let near = ours.host.same_machine(&theirs.host) && theirs.other.contains_key("toy");
        if near { Ok("same machine") } else { Err("they have no loopback in common".to_owned()) }
    }
    fn dial(&self, dial: &Dial<'_>) -> Result<Dialed> {
        let address = &dial.info.other["toy"];
        let socket = TcpStream::connect(address).and_then(|s| s.set_nonblocking(true).map(|()| s));
        let mut socket = match socket {
            Ok(socket) => socket,
            Err(e) => return Ok(Dialed::NotPossible(e.to_string())),
        };
        let peer = dial.peer(address.clone());
        dial.greet(&mut socket, &peer)?;
        Ok(Dialed::Linked(link::pair(socket, peer, dial.options).map_err(os)?))
    }
    fn listeners(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.0.as_fd()]
    }
    fn incoming(&self) -> std::io::Result<Option<Box<dyn Conn>>> {
        match self.0.accept() {
            Ok((socket, address)) => {
                socket.set_nonblocking(true)?;
                Ok(Some(Box::new(StreamConn::new(socket, address.to_string()))))
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
    fn accept(&self, mut conn: Box<dyn Conn>, accept: &Accept<'_>) -> Result<Result<LinkPair, String>> {
        let peer = accept.peer(conn.address());
        Ok(accept.welcome(&mut *conn).and_then(|()| {
            let socket = conn.downcast::<StreamConn<TcpStream>>()?.into_inner();
            link::pair(socket, peer, accept.options).map_err(|e| e.to_string())
        }))
    }
}
