//! The dialing side: makes the memory and hands it over.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::listen::address;
use super::socket;
use crate::config;
use crate::doorbell::Doorbell;
use crate::error::Result;
use crate::fork::Kept;
use crate::transport::fabric::{Dial, Dialed};
use crate::transport::handshake::Reply;
use crate::transport::mapping::Mapping;
use crate::transport::packet;
use crate::transport::shm::{Ends, Layout, Lifeline, SingleCopy, ZeroCopyFrom, introduce, pair};
use crate::transport::wait::Wait;

/// How long a full backlog is waited for.
const BACKLOG: Duration = Duration::from_secs(3);

/// Dials the acceptor's socket `name` and makes the link.
///
/// # Errors
/// [`Error::Timeout`](crate::Error::Timeout), the abort's error, [`Error::Protocol`](crate::Error::Protocol) when the peer
/// does not want the link.
pub(super) fn connect(
    name: &str,
    dial: &Dial<'_>,
    (choice, ordinary): (config::SingleCopy, &ZeroCopyFrom),
) -> Result<Dialed> {
    let wait = dial.wait;
    let layout = Layout::new(dial.options)?;
    let not_possible = |what: &str, e: &dyn std::fmt::Display| Ok(Dialed::NotPossible(format!("{what}: {e}")));
    let socket = match socket::new() {
        Ok(socket) => Kept::new(socket),
        Err(e) => return not_possible("socket", &e),
    };
    let addr = match SocketAddrUnix::new_abstract_name(name.as_bytes()) {
        Ok(addr) => addr,
        Err(e) => return not_possible("socket name", &e),
    };
    let full_since = wait.left();
    loop {
        match rustix::net::connect(&socket, &addr) {
            Ok(()) => break,
            // The backlog is full: the acceptor is busy with many others.
            Err(Errno::AGAIN) if full_since.saturating_sub(wait.left()) < BACKLOG => {
                wait.pause(Duration::from_millis(1), || "its Unix socket accepts nothing".to_owned())?;
            }
            Err(Errno::INTR) => {}
            Err(e) => return not_possible("connecting to its Unix socket", &e),
        }
    }
    // Before anything is told to whoever listens there.
    let pid = match socket::same_user(&socket) {
        Ok(pid) => pid,
        Err(e) => return not_possible("its Unix socket", &e),
    };
    let who = dial.peer(address(pid));
    let caller = dial.caller.fresh()?;
    if let Err(e) = packet::send(&socket, None, bytemuck::bytes_of(&caller.hello), &[]) {
        return not_possible("its Unix socket", &e);
    }
    let proof = match recv_reply(&socket, wait)? {
        Ok((Reply::Prove(challenge), _)) => caller.answer(&challenge),
        Ok((Reply::Stranger(detail), _)) | Err(detail) => Err(detail),
        Ok(_) => Err("expected a challenge".to_owned()),
    };
    let proof = match proof {
        Ok(proof) => proof,
        Err(e) => return not_possible("its Unix socket", &e),
    };
    let (memory, memfd) = match Mapping::memfd(layout.bytes()) {
        Ok((memory, memfd)) => (Arc::new(memory), memfd),
        Err(e) => return not_possible("memory", &e),
    };
    introduce(&memory, layout, 0)?;
    if let Err(e) = packet::send(&socket, None, &proof, &[memfd.as_fd(), dial.bell.as_fd()]) {
        return not_possible("passing the memory", &e);
    }
    drop(memfd);
    let fds = match recv_reply(&socket, wait)? {
        Ok((Reply::Welcome, fds)) => fds,
        Ok((Reply::UseTcp(detail) | Reply::Stranger(detail), _)) => return Ok(Dialed::NotPossible(detail)),
        Ok((Reply::Refused(detail), _)) => return Err(who.protocol("connect", detail)),
        Ok((Reply::Prove(_), _)) => return Err(who.protocol("connect", "expected a welcome".to_owned())),
        Err(detail) => return not_possible("its Unix socket", &detail),
    };
    let Some(theirs) = fds.into_iter().next() else {
        return Err(who.protocol("connect", "expected its doorbell with the answer, got none".to_owned()));
    };
    let ends = Ends {
        peer: who,
        bell: Doorbell::from_fd(theirs),
        lifeline: Some(Lifeline::new(socket)),
        single_copy: SingleCopy { pid, choice, ordinary: ordinary.clone() },
    };
    Ok(Dialed::Linked(pair(&memory, layout, 0, ends, "shm")?))
}

/// The next reply and what came with it. The inner error says why there is none, the outer one ends the wait.
fn recv_reply(socket: &OwnedFd, wait: &Wait<'_>) -> Result<Result<(Reply, Vec<OwnedFd>), String>> {
    let mut bytes = [0; Reply::MAX];
    loop {
        match packet::recv(socket, &mut bytes) {
            Ok((0, _)) => return Ok(Err("closed without an answer".to_owned())),
            Ok((n, fds)) => return Ok(Reply::parse(bytes.get(..n).unwrap_or_default()).map(|reply| (reply, fds))),
            Err(Errno::AGAIN) => {
                let detail = || "it took the connection and has not asked for this link yet".to_owned();
                wait.ready(socket, PollFlags::IN, wait.left(), detail)?;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Ok(Err(e.to_string())),
        }
    }
}
