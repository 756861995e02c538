//! The accepting side: an abstract Unix socket, and connections that have not said who they are.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketAddrUnix, SocketFlags};

use super::socket;
use crate::config;
use crate::error::{Error, Result};
use crate::fork::Kept;
use crate::secret::Proof;
use crate::transport::doorbell::Doorbell;
use crate::transport::handshake::{Hello, Reply};
use crate::transport::mapping::Mapping;
use crate::transport::packet;
use crate::transport::ring::{self, Ends, Layout, LendFrom, Lifeline, SingleCopy};
use crate::transport::{LinkOptions, LinkPair, Peer};

/// A listening socket in the abstract namespace.
#[derive(Debug)]
pub(crate) struct Port {
    listener: Kept<OwnedFd>,
    pub(crate) name: String,
}

impl Port {
    pub(crate) fn bind() -> Result<Port> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let os = |e| Error::errno("listen", "on an abstract Unix socket", e);
        let listener = socket::new().map_err(os)?;
        // The time keeps names apart in process namespaces that share a network namespace.
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        loop {
            let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let name = format!("tinynccl-{pid}-{n}-{:x}{:08x}", time.tv_sec, time.tv_nsec);
            let addr = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(os)?;
            match rustix::net::bind(&listener, &addr) {
                Ok(()) => {
                    rustix::net::listen(&listener, 1024).map_err(os)?;
                    return Ok(Port { listener: Kept::new(listener), name });
                }
                Err(Errno::ADDRINUSE) => {}
                Err(e) => return Err(os(e)),
            }
        }
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// The next connection, if there is one.
pub(crate) fn accept(port: &Port) -> std::io::Result<Option<Pending>> {
    match rustix::net::accept_with(&port.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(match socket::same_user(&socket) {
            Ok(pid) => Pending { socket: Kept::new(socket), pid, stranger: None, fds: None },
            Err(reason) => Pending { socket: Kept::new(socket), pid: 0, stranger: Some(reason), fds: None },
        })),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// A connection whose [`Hello`] or proof has not come, or not been answered.
#[derive(Debug)]
pub(crate) struct Pending {
    socket: Kept<OwnedFd>,
    pid: i32,
    /// Why it will not be heard, if so.
    stranger: Option<String>,
    /// The memory and the doorbell that came with the proof.
    fds: Option<(OwnedFd, OwnedFd)>,
}

impl Pending {
    /// The hello's bytes once they are there, an error when they will not come.
    pub(crate) fn hello(&mut self) -> Result<Option<[u8; Hello::BYTES]>, String> {
        self.packet(&mut Vec::new())
    }

    /// The proof, in the same way. The memory and the doorbell come with it.
    pub(crate) fn proof(&mut self) -> Result<Option<Proof>, String> {
        let mut fds = Vec::new();
        let Some(proof) = self.packet(&mut fds)? else { return Ok(None) };
        let Ok([memory, bell]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err("expected two descriptors".to_owned());
        };
        self.fds = Some((memory, bell));
        Ok(Some(proof))
    }

    /// The next packet, if it is there, and the descriptors that came with it.
    fn packet<const N: usize>(&mut self, with: &mut Vec<OwnedFd>) -> Result<Option<[u8; N]>, String> {
        if let Some(reason) = self.stranger.take() {
            return Err(reason);
        }
        let mut bytes = [0; N];
        match packet::recv(&self.socket, &mut bytes) {
            Ok((0, _)) => Err("closed before it said who it is".to_owned()),
            Ok((n, fds)) if n == N => {
                *with = fds;
                Ok(Some(bytes))
            }
            Ok((n, _)) => Err(format!("expected {N} bytes, got {n}")),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(e) => Err(e.to_string()),
        }
    }

    pub(crate) fn reply(&mut self, reply: &Reply) -> Result<(), String> {
        packet::send(&self.socket, None, &reply.to_bytes(), &[]).map_err(|e| e.to_string())
    }

    pub(crate) fn address(&self) -> String {
        address(self.pid)
    }

    /// The dialer has gone away in the meantime.
    pub(crate) fn is_gone(&self) -> bool {
        let result = rustix::net::recv(&self.socket, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(result, Err(Errno::AGAIN))
    }
}

impl AsFd for Pending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(super) fn address(pid: i32) -> String {
    format!("shared memory of process {pid}")
}

/// Maps the dialer's memory, answers that the link stands, and makes it. What fails before the answer is told to the
/// dialer, so that it can fall back to TCP.
pub(crate) fn finish(
    mut pending: Pending,
    (rank, peer): (usize, usize),
    options: &LinkOptions,
    bell: &Arc<Doorbell>,
    (choice, ordinary): (config::SingleCopy, &LendFrom),
) -> Result<LinkPair, String> {
    let Some((memory, theirs)) = pending.fds.take() else { return Err("no memory came".to_owned()) };
    let layout = Layout::new(options).map_err(|e| e.to_string())?;
    let memory = match Mapping::of_peer(&memory, layout.bytes()) {
        Ok(memory) => Arc::new(memory),
        Err(e) => {
            pending.reply(&Reply::UseTcp(e.to_string()))?;
            return Err(e.to_string());
        }
    };
    ring::introduce(&memory, layout, 1).map_err(|e| e.to_string())?;
    let reply = Reply::Welcome.to_bytes();
    packet::send(&pending.socket, None, &reply, &[bell.as_fd()]).map_err(|e| e.to_string())?;
    let ends = Ends {
        peer: Peer { rank, peer, address: pending.address() },
        bell: Doorbell::from_fd(theirs),
        lifeline: Some(Lifeline::new(pending.socket)),
        single_copy: SingleCopy { pid: pending.pid, choice, ordinary: ordinary.clone() },
    };
    ring::pair(&memory, layout, 1, ends, "shm").map_err(|e| e.to_string())
}
