//! The dialing side: makes the memory and hands it over.

use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType};

use super::listen::address;
use super::packet;
use crate::LinkPair;
use crate::accept::handshake::Reply;
use crate::accept::stream::Failure;
use crate::fabric::{Dial, Dialed};
use crate::memory::mapping::Mapping;
use crate::shm::{Ends, Layout, Lifeline, SingleCopy, ZeroCopyFrom, introduce, pair};
use crate::wait::Wait;
use tinynccl_plan::error::Result;
use tinynccl_sys::config;
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Kept;
use tinynccl_sys::unix;

/// Longest wait while the acceptor's backlog is full.
const BACKLOG: Duration = Duration::from_secs(3);

/// Dials the acceptor's socket `name` and makes the link.
///
/// # Errors
/// [`Error::Timeout`](tinynccl_plan::Error::Timeout), the abort's error,
/// [`Error::Protocol`](tinynccl_plan::Error::Protocol) when the peer does not want the link.
pub(super) fn connect(name: &str, dial: &Dial<'_>, copy: (config::SingleCopy, &ZeroCopyFrom)) -> Result<Dialed> {
    match link(name, dial, copy) {
        Ok(pair) => Ok(Dialed::Linked(pair)),
        Err(Failure::Final(e)) => Err(e),
        Err(Failure::Wrong(why) | Failure::Refused(why)) => Ok(Dialed::NotPossible(why)),
        Err(Failure::Slow(why)) => Ok(Dialed::Gone(why)),
    }
}

/// Another fabric may do, because `what` failed.
fn failed<E: Display>(what: &str) -> impl FnOnce(E) -> Failure {
    move |e| Failure::Wrong(format!("{what}: {e}"))
}

/// Makes the failure of a call `what` on the peer's socket, which shows when the other end is gone: then the peer may
/// be dialed again.
fn ended(what: &str) -> impl FnOnce(Errno) -> Failure {
    move |e| match e {
        Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE => Failure::Slow(format!("{what}: {e}")),
        _ => Failure::Wrong(format!("{what}: {e}")),
    }
}

fn link(
    name: &str,
    dial: &Dial<'_>,
    (choice, ordinary): (config::SingleCopy, &ZeroCopyFrom),
) -> Result<LinkPair, Failure> {
    const SOCKET: &str = "its Unix socket";
    let wait = dial.wait;
    let layout = Layout::new(dial.options)?;
    let socket = Kept::new(unix::socket(SocketType::SEQPACKET).map_err(failed("socket"))?);
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed("socket name"))?;
    let full_since = wait.left();
    loop {
        match rustix::net::connect(&socket, &addr) {
            Ok(()) => break,
            // The backlog is full: the acceptor is busy with many others.
            Err(Errno::AGAIN) if full_since.saturating_sub(wait.left()) < BACKLOG => {
                wait.pause(Duration::from_millis(1), || "its Unix socket accepts nothing".to_owned())?;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(ended("connecting to its Unix socket")(e)),
        }
    }
    // Before anything is sent to the process that listens there.
    let pid = unix::same_user(&socket).map_err(failed(SOCKET))?;
    let who = dial.peer(address(pid));
    let caller = dial.caller().fresh(false)?;
    packet::send(&socket, None, bytemuck::bytes_of(&caller.hello), &[]).map_err(ended(SOCKET))?;
    let proof = match recv_reply(&socket, wait)?.0 {
        Reply::Prove(challenge, None) => caller.answer(&challenge, &[]),
        Reply::Stranger(detail) => Err(detail),
        _ => Err("expected a challenge".to_owned()),
    };
    let proof = proof.map_err(failed(SOCKET))?;
    let (memory, memfd) = Mapping::memfd(layout.bytes()).map_err(failed("memory"))?;
    let memory = Arc::new(memory);
    introduce(&memory, layout, 0)?;
    packet::send(&socket, None, &proof, &[memfd.as_fd(), dial.bell.as_fd()]).map_err(ended("passing the memory"))?;
    drop(memfd);
    let fds = match recv_reply(&socket, wait)? {
        (Reply::Welcome, fds) => fds,
        (Reply::Stranger(detail), _) => return Err(Failure::Wrong(detail)),
        (Reply::Refused(detail), _) => return Err(who.protocol("connect", detail).into()),
        (Reply::Prove(..), _) => return Err(who.protocol("connect", "expected a welcome".to_owned()).into()),
    };
    let Some(theirs) = fds.into_iter().next() else {
        return Err(who.protocol("connect", "expected its doorbell with the answer, got none".to_owned()).into());
    };
    let ends = Ends {
        peer: who,
        bell: Doorbell::from_fd(theirs),
        lifeline: Some(Lifeline::new(socket)),
        single_copy: SingleCopy { pid, choice, ordinary: ordinary.clone() },
    };
    Ok(pair(&memory, layout, 0, ends, "shm")?)
}

/// Receives the next reply and the descriptors that came with it.
fn recv_reply(socket: &OwnedFd, wait: &Wait<'_>) -> Result<(Reply, Vec<OwnedFd>), Failure> {
    const SOCKET: &str = "its Unix socket";
    let mut bytes = [0; Reply::MAX];
    loop {
        match packet::recv(socket, &mut bytes) {
            Ok((0, _)) => return Err(Failure::Slow(format!("{SOCKET}: closed without an answer"))),
            Ok((n, fds)) => {
                let reply = Reply::parse(bytes.get(..n).unwrap_or_default());
                return reply.map(|reply| (reply, fds)).map_err(failed(SOCKET));
            }
            Err(Errno::AGAIN) => {
                let detail = || "it took the connection and has not asked for this link yet".to_owned();
                wait.ready(socket, PollFlags::IN, wait.left(), detail)?;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(ended(SOCKET)(e)),
        }
    }
}
