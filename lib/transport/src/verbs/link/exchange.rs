//! The messages over TCP by which two ranks join their queue pairs.
//!
//! ```text
//! lower rank (dialer)                                higher rank
//! hello, welcome                     (handshake.rs, as for every link)
//! card: memory to write to,      ->
//!       and per queue pair its
//!       port and the peer's
//!                                                    queue pairs to INIT, receives, RTR, RTS
//!                                <-  card
//! queue pairs to RTR, RTS
//! ready                          ->
//! ```
//! Once both return, both queue pairs take what comes. Instead of a card, either may send the reason why it has none.

use std::io::Write;
use std::net::TcpStream;

use crate::Peer;
use crate::accept::handshake::cut;
use crate::accept::stream::{self, Failure};
use crate::wait::Wait;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::MAX_QPS;

/// Our target memory, as the peer must know it. Little endian, as are the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct MemoryCard {
    /// Memory that the peer writes to.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) lines: u32,
    pub(crate) slots: u32,
}

/// A queue pair of ours, as the peer's must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct QpCard {
    /// Our port.
    pub(crate) gid: [u8; 16],
    /// The peer's port that the dialer chose.
    pub(crate) wanted: [u8; 16],
    /// Key of the memory for our device.
    pub(crate) rkey: u32,
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) lid: u32,
    /// `ibv_mtu` code of our port.
    pub(crate) mtu: u32,
}

/// One side of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) memory: MemoryCard,
    /// By number, from 1 to [`MAX_QPS`].
    pub(crate) qps: Vec<QpCard>,
}

impl Card {
    fn to_bytes(&self) -> Vec<u8> {
        [bytemuck::bytes_of(&self.memory), bytemuck::cast_slice(&self.qps)].concat()
    }

    fn parse(bytes: &[u8]) -> Option<Card> {
        let (memory, qps) = bytes.split_at_checked(size_of::<MemoryCard>())?;
        let (qps, rest) = qps.as_chunks::<{ size_of::<QpCard>() }>();
        let fits = rest.is_empty() && (1..=MAX_QPS).contains(&qps.len());
        fits.then(|| Card {
            memory: bytemuck::pod_read_unaligned(memory),
            qps: qps.iter().map(|qp| bytemuck::cast(*qp)).collect(),
        })
    }
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

/// Sends our card, or the reason why there is none.
pub(crate) fn send_card(socket: &mut TcpStream, who: &Peer, card: Result<&Card, &Error>) -> Result<()> {
    match card {
        Ok(card) => send(socket, who, CARD, &card.to_bytes()),
        Err(reason) => send(socket, who, REASON, cut(&reason.to_string(), LONGEST).as_bytes()),
    }
}

/// The peer's card.
pub(crate) fn recv_card(socket: &mut TcpStream, who: &Peer, wait: &Wait<'_>) -> Result<Card> {
    match receive(socket, who, wait)? {
        (CARD, body) => Card::parse(&body)
            .ok_or_else(|| who.protocol("connect", format!("expected an RDMA card, got {} bytes", body.len()))),
        (what, _) => Err(who.protocol("connect", format!("expected an RDMA card, got message {what}"))),
    }
}

pub(crate) fn send_ready(socket: &mut TcpStream, who: &Peer) -> Result<()> {
    send(socket, who, READY, &[])
}

pub(crate) fn recv_ready(socket: &mut TcpStream, who: &Peer, wait: &Wait<'_>) -> Result<()> {
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
    let detail = "it has not told its side of the RDMA link yet";
    stream::read_exact(socket, bytes, wait, detail).map_err(|failure| match failure {
        Failure::Final(e) => e,
        Failure::Wrong(text) | Failure::Slow(text) | Failure::Refused(text) => {
            who.lost("connect", &format!("{text} while the RDMA link was being made"))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn card(qps: usize) -> Card {
        let one = |i| QpCard { gid: [1; 16], wanted: [2; 16], rkey: i, qpn: 2 * i, psn: 3 * i, lid: 0, mtu: 5 };
        let memory = MemoryCard { address: 7 << 40, bytes: 1 << 33, lines: 32, slots: 6 };
        Card { memory, qps: (0..qps as u32).map(one).collect() }
    }

    #[test]
    fn cards_go_there_and_back_and_the_largest_fits() {
        for qps in 1..=MAX_QPS {
            assert_eq!(Card::parse(&card(qps).to_bytes()), Some(card(qps)));
        }
        assert!(card(MAX_QPS).to_bytes().len() <= LONGEST);
        assert_eq!(Card::parse(&card(0).to_bytes()), None);
        assert_eq!(Card::parse(&card(MAX_QPS + 1).to_bytes()), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let whole = bytes.len() >= 24 + 52 && (bytes.len() - 24).is_multiple_of(52);
            prop_assert_eq!(Card::parse(&bytes).is_some(), whole);
        }
    }
}
