//! Links over TCP: one full-duplex stream per (peer, channel).
//!
//! Payload goes from the sender's memory to the kernel and from the kernel to the receiver's memory without a copy of ours:
//! `sendmsg` of [header, data] and `readv` to [rest of the payload, a few bytes ahead]. Slots, `depth` per direction, exist
//! only for messages that are reserved (send) or come before they are asked for (receive).
//!
//! Memory per link: 4 KiB, and up to `2 * depth * max_message` when all slots are in use; plus the kernel's buffers.

mod connect;
mod frame;
mod linger;
mod listen;
mod options;
mod recv;
mod send;

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

pub(crate) use connect::connect;
pub(crate) use linger::{Closing, Linger};
pub(crate) use listen::{Pending, Port, accept, finish};
pub(crate) use options::SocketOptions;

use super::{LinkOptions, LinkPair, Peer};
use crate::error::{Error, Result};

/// A connected, non-blocking socket, shared by the two halves of a link.
#[derive(Debug)]
struct Stream {
    /// `None` only while it is dropped.
    socket: Option<TcpStream>,
    linger: Arc<Linger>,
}

impl Stream {
    fn socket(&self) -> Result<&TcpStream> {
        self.socket.as_ref().ok_or_else(|| Error::invalid("tcp", "the socket of a link is closed"))
    }

    /// Why the peer is gone, if it is: it reset the connection or will send nothing more.
    fn broken(&self) -> Result<Option<String>> {
        let socket = self.socket()?;
        let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1)) {
            return Ok(None);
        }
        Ok(match socket.take_error() {
            Ok(Some(e)) => Some(e.to_string()),
            _ => Some(CLOSED.to_owned()),
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            self.linger.take(socket);
        }
    }
}

const CLOSED: &str = "it closed the connection";

/// Both halves of a link over a connection whose handshake is done.
pub(crate) fn pair(socket: TcpStream, peer: Peer, options: &LinkOptions, linger: &Arc<Linger>) -> Result<LinkPair> {
    options.check()?;
    let stream = Arc::new(Stream { socket: Some(socket), linger: linger.clone() });
    let depth = options.depth.next_power_of_two().max(2);
    Ok(LinkPair {
        send: Box::new(send::TcpSend::new(stream.clone(), peer.clone(), options.max_message, depth)),
        recv: Box::new(recv::TcpRecv::new(stream, peer, options.max_message, depth)?),
        kind: "tcp",
    })
}

fn describe(addr: SocketAddr) -> String {
    // An IPv4 peer seen through an IPv6 socket is still an IPv4 peer.
    SocketAddr::new(addr.ip().to_canonical(), addr.port()).to_string()
}
