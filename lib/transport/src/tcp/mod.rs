//! Links over TCP: one full-duplex stream per (peer, channel), or several ([`stripes`]).
//!
//! Payload goes from the sender's memory to the kernel and from the kernel to the receiver's memory without a copy of
//! ours: `sendmsg` of [header, data] and `readv` to [rest of the payload, a few bytes ahead]. What is combined with
//! other values passes through 64 KiB that stay in the cache ([`RecvLink::recv_chunks`](super::RecvLink::recv_chunks)).
//! A small message is one `send` and one `recv`, copied next to its header: one buffer costs the kernel 0.2 µs less
//! than two. Slots, `depth` per direction, exist only for messages that are reserved (send) or come before they are
//! asked for (receive).
//!
//! Memory per link: up to 68 KiB to read to, and up to `2 * depth * max_message` when all slots are in use; plus the
//! kernel's buffers.
//!
//! # What is not used
//! - `MSG_ZEROCOPY`: over loopback the kernel copies all the same (Linux, `Documentation/networking/msg_zerocopy.rst`)
//!   and adds a notification per call.
//! - `io_uring`: what it saves is the entry into the kernel, 0.2 µs of the 5 µs that one rank works for an 8-byte
//!   exchange; the rest is TCP itself, in both. Long messages take 64 KiB and more per call.
//! - `SO_SNDBUF`, `SO_RCVBUF`: a fixed size turns the kernel's tuning off and is capped by `net.core.wmem_max`, often
//!   below what the tuning reaches. With iperf3, sizes from 128 KiB to 1 MiB were mostly slower than none. They remain
//!   a setting.

mod connect;
pub(crate) mod fabric;
mod frame;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
mod intake;
mod linger;
pub(crate) mod listen;
mod options;
mod recv;
mod send;
mod stripes;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

pub(crate) use connect::open;
pub(crate) use listen::{Port, incoming};
pub(crate) use options::SocketOptions;

use super::accept::stream::CLOSED;
use super::fabric::Bind;
use super::linger::Linger;
use super::seal::Socket;
use super::{LinkOptions, LinkPair, Peer};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::fork::Kept;
use tinynccl_sys::threads::poll;

/// This transport, for an endpoint.
pub(crate) const BIND: Bind = ("TCP", fabric::bind);

/// The connected, non-blocking sockets of a link, shared by its two halves.
#[derive(Debug)]
struct Streams {
    /// Empty only while it is dropped.
    sockets: Vec<Kept<Socket>>,
    linger: Arc<Linger>,
}

impl Streams {
    fn socket(&self, stream: usize) -> Result<&Socket> {
        self.sockets
            .get(stream)
            .map(|socket| &**socket)
            .ok_or_else(|| Error::invalid("tcp", "the socket of a link is closed"))
    }

    /// Why the peer is gone, if it is: it reset a connection or will send nothing more.
    fn broken(&self) -> Option<String> {
        let mut fds: Vec<PollFd<'_>> = self.sockets.iter().map(|s| PollFd::new(&**s, PollFlags::RDHUP)).collect();
        if !matches!(poll(&mut fds, Duration::ZERO), Ok(1..)) {
            return None;
        }
        let error = self.sockets.iter().find_map(|s| s.tcp().take_error().ok().flatten());
        Some(error.map_or(CLOSED.to_owned(), |e| e.to_string()))
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for socket in self.sockets.drain(..) {
            linger::close(socket.into_inner(), &self.linger);
        }
    }
}

/// Both halves of a link over connections whose handshake is done.
fn pair(sockets: Vec<Socket>, peer: Peer, options: &LinkOptions, linger: &Arc<Linger>) -> Result<LinkPair> {
    options.check()?;
    let sockets = sockets.into_iter().map(Kept::new).collect();
    let stream = Arc::new(Streams { sockets, linger: linger.clone() });
    let depth = options.depth.next_power_of_two().max(2);
    Ok(LinkPair {
        send: Box::new(send::TcpSend::new(stream.clone(), peer.clone(), options.max_message, depth)),
        recv: Box::new(recv::TcpRecv::new(stream, peer, options.max_message, depth)?),
        kind: "tcp",
        any_length: false,
    })
}

pub(crate) fn describe(addr: SocketAddr) -> String {
    // An IPv4 peer seen through an IPv6 socket is still an IPv4 peer.
    SocketAddr::new(addr.ip().to_canonical(), addr.port()).to_string()
}
