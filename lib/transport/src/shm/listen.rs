//! The accepting side: an abstract Unix socket, and unauthenticated connections.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::packet;
use crate::LinkPair;
use crate::accept::conn::Conn;
use crate::accept::handshake::Reply;
use crate::fabric::Accept;
use crate::memory::mapping::Mapping;
use crate::shm::{Ends, Layout, Lifeline, SingleCopy, ZeroCopyFrom, introduce, pair};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::unix;

/// A listening socket in the abstract namespace.
#[derive(Debug)]
pub(super) struct Port {
    listener: Kept<OwnedFd>,
    pub(super) name: String,
}

impl Port {
    pub(super) fn bind() -> Result<Port> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let os = |e| Error::errno("listen", "on an abstract Unix socket", e);
        let listener = unix::socket(SocketType::SEQPACKET).map_err(os)?;
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
pub(super) fn incoming(port: &Port) -> std::io::Result<Option<Pending>> {
    match rustix::net::accept_with(&port.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(match unix::same_user(&socket) {
            Ok(pid) => Pending::new(socket, pid, None),
            Err(reason) => Pending::new(socket, 0, Some(reason)),
        })),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// A connection whose handshake goes on. The hello comes alone, the memory and the doorbell come with the proof.
#[derive(Debug)]
pub(super) struct Pending {
    socket: Kept<OwnedFd>,
    pid: i32,
    /// Reason why it will be rejected, if it will.
    stranger: Option<String>,
    has_said_hello: bool,
    /// The memory and the doorbell.
    fds: Option<(OwnedFd, OwnedFd)>,
}

impl Pending {
    fn new(socket: OwnedFd, pid: i32, stranger: Option<String>) -> Pending {
        Pending { socket: Kept::new(socket), pid, stranger, has_said_hello: false, fds: None }
    }
}

impl Conn for Pending {
    fn read(&mut self, bytes: &mut [u8]) -> Result<bool, String> {
        if let Some(reason) = self.stranger.take() {
            return Err(reason);
        }
        let fds = match packet::recv(&self.socket, bytes) {
            Ok((0, _)) => return Err("closed before it said who it is".to_owned()),
            Ok((n, fds)) if n == bytes.len() => fds,
            Ok((n, _)) => return Err(format!("expected {} bytes, got {n}", bytes.len())),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(e) => return Err(e.to_string()),
        };
        if std::mem::replace(&mut self.has_said_hello, true) {
            let [memory, bell] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| "expected two descriptors".to_owned())?;
            self.fds = Some((memory, bell));
        }
        Ok(true)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        packet::send(&self.socket, None, bytes, &[]).map_err(|e| e.to_string())
    }

    fn address(&self) -> String {
        address(self.pid)
    }

    fn is_gone(&self) -> bool {
        let result = rustix::net::recv(&self.socket, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(result, Err(Errno::AGAIN))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(super) fn address(pid: i32) -> String {
    format!("shared memory of process {pid}")
}

/// Maps the dialer's memory, answers that the link stands, and makes it. A failure to map the memory is reported to the
/// dialer, so that it can fall back to TCP.
pub(super) fn finish(
    conn: Box<dyn Conn>,
    accept: &Accept<'_>,
    (choice, ordinary): (config::SingleCopy, &ZeroCopyFrom),
) -> Result<LinkPair, String> {
    let mut pending = conn.downcast::<Pending>()?;
    let Some((memory, theirs)) = pending.fds.take() else { return Err("no memory came".to_owned()) };
    let layout = Layout::new(accept.options).map_err(|e| e.to_string())?;
    let memory = match Mapping::of_peer(&memory, layout.bytes()) {
        Ok(memory) => Arc::new(memory),
        Err(e) => {
            pending.write(&Reply::Stranger(e.to_string()).to_bytes())?;
            return Err(e.to_string());
        }
    };
    introduce(&memory, layout, 1).map_err(|e| e.to_string())?;
    let reply = Reply::Welcome.to_bytes();
    packet::send(&pending.socket, None, &reply, &[accept.bell.as_fd()]).map_err(|e| e.to_string())?;
    let ends = Ends {
        peer: accept.peer(pending.address()),
        bell: Doorbell::from_fd(theirs),
        lifeline: Some(Lifeline::new(pending.socket)),
        single_copy: SingleCopy { pid: pending.pid, choice, ordinary: ordinary.clone() },
    };
    pair(&memory, layout, 1, ends, "shm").map_err(|e| e.to_string())
}
