//! What two ranks tell each other over TCP before their queue pairs can talk.
//!
//! ```text
//! lower rank (dialer)                                higher rank
//! hello, welcome                     (handshake.rs, as for every link)
//! card: which port, queue pair,  ->
//!       memory to write to
//!                                                    queue pair to INIT, receives, RTR, RTS
//!                                <-  card
//! queue pair to RTR, RTS
//! ready                          ->
//! ```
//! When both return, both queue pairs take what comes. Instead of a card, either may say why it has none.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use rustix::event::PollFlags;

use crate::error::{Error, Result};
use crate::transport::Peer;
use crate::transport::wait::Wait;

/// What the peer's queue pair has to know of ours. Little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Card {
    /// Our port.
    pub(super) gid: [u8; 16],
    /// The peer's port that we chose.
    pub(super) wanted: [u8; 16],
    /// Memory that the peer writes to.
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) rkey: u32,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) lid: u32,
    /// `ibv_mtu` code of our port.
    pub(super) mtu: u32,
    pub(super) lines: u32,
    pub(super) slots: u32,
    pub(super) padding: u32,
}

#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Head {
    /// A card follows (0), a reason (1), nothing (2).
    what: u32,
    len: u32,
}

const CARD: u32 = 0;
const REASON: u32 = 1;
const READY: u32 = 2;
/// Longest reason.
const LONGEST: usize = 2048;

fn send(socket: &mut TcpStream, who: &Peer, what: u32, body: &[u8]) -> Result<()> {
    let head = Head { what, len: body.len() as u32 };
    let bytes = [bytemuck::bytes_of(&head), body].concat();
    // So little fits into the send buffer of a connection that has carried nothing but a handshake.
    socket.write_all(&bytes).map_err(|e| who.lost("connect", &e.to_string()))
}

/// Sends our card, or says why there is none.
pub(super) fn tell(socket: &mut TcpStream, who: &Peer, card: Result<&Card, &Error>) -> Result<()> {
    match card {
        Ok(card) => send(socket, who, CARD, bytemuck::bytes_of(card)),
        Err(reason) => {
            let mut reason = reason.to_string();
            let fits = (0..=LONGEST.min(reason.len())).rev().find(|&i| reason.is_char_boundary(i)).unwrap_or(0);
            reason.truncate(fits);
            send(socket, who, REASON, reason.as_bytes())
        }
    }
}

/// The peer's card.
pub(super) fn hear(socket: &mut TcpStream, who: &Peer, wait: &Wait<'_>) -> Result<Card> {
    match receive(socket, who, wait)? {
        (CARD, body) => bytemuck::try_pod_read_unaligned(&body)
            .map_err(|_| who.protocol("connect", format!("expected an RDMA card, got {} bytes", body.len()))),
        (what, _) => Err(who.protocol("connect", format!("expected an RDMA card, got message {what}"))),
    }
}

pub(super) fn tell_ready(socket: &mut TcpStream, who: &Peer) -> Result<()> {
    send(socket, who, READY, &[])
}

pub(super) fn hear_ready(socket: &mut TcpStream, who: &Peer, wait: &Wait<'_>) -> Result<()> {
    match receive(socket, who, wait)? {
        (READY, _) => Ok(()),
        (what, _) => Err(who.protocol("connect", format!("expected that the queue pair is ready, got message {what}"))),
    }
}

fn receive(socket: &mut TcpStream, who: &Peer, wait: &Wait<'_>) -> Result<(u32, Vec<u8>)> {
    let mut head = [0; size_of::<Head>()];
    read_exact(socket, &mut head, who, wait)?;
    let head: Head = bytemuck::cast(head);
    if head.what > READY || head.len as usize > LONGEST {
        return Err(who.protocol("connect", format!("expected an RDMA card, got {head:?}")));
    }
    let mut body = vec![0; head.len as usize];
    read_exact(socket, &mut body, who, wait)?;
    if head.what == REASON {
        let reason = String::from_utf8_lossy(&body).into_owned();
        return Err(who.protocol("connect", format!("it cannot make its side of the RDMA link: {reason}")));
    }
    Ok((head.what, body))
}

fn read_exact(socket: &mut TcpStream, bytes: &mut [u8], who: &Peer, wait: &Wait<'_>) -> Result<()> {
    let mut got = 0;
    while let Some(rest) = bytes.get_mut(got..).filter(|r| !r.is_empty()) {
        match socket.read(rest) {
            Ok(0) => return Err(who.lost("connect", "it closed the connection while the RDMA link was being made")),
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                let detail = || "it has not told its side of the RDMA link yet".to_owned();
                wait.ready(socket, PollFlags::IN, wait.left(), detail)?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(who.lost("connect", &e.to_string())),
        }
    }
    Ok(())
}
