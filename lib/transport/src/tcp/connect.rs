//! The dialing side: tries the peer's addresses until one of them answers as the peer.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use socket2::{Domain, SockRef, Type};

use super::{SocketOptions, describe, pair};
use crate::accept::handshake::Caller;
use crate::accept::stream::{Failure, greet};
use crate::fabric::Dial;
use crate::linger::Linger;
use crate::seal::Socket;
use crate::wait::Wait;
use crate::{LinkPair, Peer};
use tinynccl_plan::error::Result;

/// Longest time for one address before the next one is tried.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Rounds over all addresses after which "connection refused" everywhere is believed.
const ROUNDS: u32 = 4;

/// Likely causes when an address does not answer at all.
const OTHER_NETWORK: &str =
    ": is a firewall between, or does this network not lead to that host? TINYNCCL_IFNAME chooses the interfaces";

/// A link with all its streams, the first of which comes from [`reach`].
pub(super) fn connect(
    (socket, addr, who): (Socket, SocketAddr, Peer),
    dial: &Dial<'_>,
    sockets: &SocketOptions,
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    let mut streams = vec![socket];
    for stream in 1..dial.hello.streams() {
        let further = Caller::new(&dial.hello.of_stream(stream), dial.secret, &[]);
        streams.push(again(addr, &further, sockets, dial.wait, &who)?);
    }
    pair(streams, who, dial.options, linger)
}

/// Dials `candidates` in order, again and again, until one is the peer and sends its welcome. Returns the connection,
/// its address and the peer.
///
/// # Errors
/// [`Error::Timeout`] with what each address did, [`Error::PeerLost`] when all of them refuse, [`Error::Protocol`] when
/// the peer does not want the link.
pub(super) fn reach(
    candidates: &[(SocketAddr, String)],
    dial: &Dial<'_>,
    sockets: &SocketOptions,
) -> Result<(Socket, SocketAddr, Peer)> {
    let (wait, caller) = (dial.wait, &dial.caller());
    let (rank, peer) = dial.ranks;
    let list: Vec<String> = candidates.iter().map(|(a, why)| format!("{} ({why})", describe(*a))).collect();
    let list = list.join(", ");
    log::debug!("rank {rank}: addresses of rank {peer} in order: {list}");
    for round in 0u32.. {
        let mut failures = Vec::new();
        let mut wrong = 0;
        for (addr, why) in candidates {
            let who = Peer { rank, peer, address: describe(*addr) };
            match attempt(*addr, caller, sockets, wait) {
                Ok(socket) => {
                    log::debug!("rank {rank}: tcp to rank {peer} at {} ({why})", who.address);
                    return Ok((socket, *addr, who));
                }
                Err(failure @ (Failure::Final(_) | Failure::Refused(_))) => return Err(failure.of(&who)),
                Err(Failure::Wrong(text)) => {
                    wrong += 1;
                    failures.push(format!("{}: {text}", who.address));
                }
                Err(Failure::Slow(text)) => failures.push(format!("{} ({why}): {text}", who.address)),
            }
        }
        let detail = failures.join("; ");
        log::debug!("rank {rank}: cannot reach rank {peer} yet: {detail}");
        if wrong == candidates.len() && round + 1 >= ROUNDS {
            let detail = if candidates.is_empty() { "it advertises no address that we could reach" } else { &detail };
            return Err(Peer { rank, peer, address: list }.lost("connect", detail));
        }
        wait.pause(Duration::from_millis(25 << round.min(5)), || detail.clone())?;
    }
    Err(Peer { rank, peer, address: list }.lost("connect", "no address answered"))
}

/// Dials another stream of a link whose first one stands: now only this address will do.
fn again(
    addr: SocketAddr,
    caller: &Caller<'_>,
    sockets: &SocketOptions,
    wait: &Wait<'_>,
    who: &Peer,
) -> Result<Socket> {
    for round in 0u32.. {
        match attempt(addr, caller, sockets, wait) {
            Ok(socket) => return Ok(socket),
            Err(failure @ (Failure::Final(_) | Failure::Refused(_))) => return Err(failure.of(who)),
            Err(Failure::Wrong(text)) if round >= ROUNDS => return Err(who.lost("connect", &text)),
            Err(Failure::Wrong(text) | Failure::Slow(text)) => {
                wait.pause(Duration::from_millis(25 << round.min(5)), || text.clone())?;
            }
        }
    }
    Err(who.lost("connect", "no further connection came about"))
}

fn attempt(addr: SocketAddr, caller: &Caller<'_>, sockets: &SocketOptions, wait: &Wait<'_>) -> Result<Socket, Failure> {
    let mut socket = open(None, addr, sockets, wait)?;
    greet(&mut socket, caller, wait)?;
    Ok(socket)
}

/// A connection to `addr`, from the address `from` if one is given.
pub(crate) fn open(
    from: Option<IpAddr>,
    addr: SocketAddr,
    sockets: &SocketOptions,
    wait: &Wait<'_>,
) -> Result<Socket, Failure> {
    let os = |e: std::io::Error| match e.kind() {
        ErrorKind::ConnectionRefused => Failure::Wrong(e.to_string()),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Failure::Slow(format!("{e}{OTHER_NETWORK}")),
        _ => Failure::Slow(e.to_string()),
    };
    let socket = socket2::Socket::new(Domain::for_address(addr), Type::STREAM, None).map_err(os)?;
    socket.set_nonblocking(true).map_err(os)?;
    sockets.dialing(&SockRef::from(&socket), addr);
    if let Some(from) = from {
        socket.bind(&SocketAddr::new(from, 0).into()).map_err(os)?;
    }
    match socket.connect(&addr.into()) {
        Ok(()) => {}
        Err(e) if e.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
            let detail = || format!("{} does not answer", describe(addr));
            if !wait.ready(&socket, PollFlags::OUT, ATTEMPT.min(wait.left()), detail)? {
                return Err(Failure::Slow(format!("no answer within {ATTEMPT:?}{OTHER_NETWORK}")));
            }
            if let Some(e) = socket.take_error().map_err(os)? {
                return Err(os(e));
            }
        }
        Err(e) => return Err(os(e)),
    }
    Ok(Socket::new(socket.into(), sockets.encrypt))
}
