//! The dialing side: tries the peer's addresses until one of them answers as the peer.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, Type};

use super::{CLOSED, SocketOptions, describe, pair};
use crate::error::{Error, Result};
use crate::transport::handshake::{Caller, Reply};
use crate::transport::linger::Linger;
use crate::transport::wait::Wait;
use crate::transport::{LinkOptions, LinkPair, Peer};

/// Longest time for one address before the next one is tried.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Rounds over all addresses after which "connection refused" everywhere is believed.
const ROUNDS: u32 = 4;

/// What may be behind an address that does not answer at all.
const OTHER_NETWORK: &str =
    ": is a firewall between, or does this network not lead to that host? TINYNCCL_IFNAME chooses the interfaces";

/// Why an address did not do.
enum Failure {
    /// Nobody listens there, or not the one meant.
    Wrong(String),
    /// It may work later.
    Slow(String),
    /// No use to go on.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::Final(e)
    }
}

/// A link with all its streams; see [`reach`].
pub(crate) fn connect(
    candidates: &[(SocketAddr, String)],
    caller: &Caller,
    options: &LinkOptions,
    sockets: &SocketOptions,
    wait: &Wait<'_>,
    linger: &Arc<Linger>,
) -> Result<LinkPair> {
    let (socket, addr, who) = reach(candidates, caller, sockets, wait)?;
    let mut streams = vec![socket];
    for stream in 1..caller.hello.streams() {
        let further = Caller { hello: caller.hello.of_stream(stream), ..*caller };
        streams.push(again(addr, &further, sockets, wait, &who)?);
    }
    pair(streams, who, options, linger)
}

/// Dials `candidates` in order, again and again, until one is the peer and says welcome: the connection, and whom it is with.
///
/// # Errors
/// [`Error::Timeout`] with what each address did, [`Error::PeerLost`] when all of them refuse, [`Error::Protocol`] when the
/// peer does not want the link.
pub(crate) fn reach(
    candidates: &[(SocketAddr, String)],
    caller: &Caller,
    sockets: &SocketOptions,
    wait: &Wait<'_>,
) -> Result<(TcpStream, SocketAddr, Peer)> {
    let (rank, peer) = (wait.rank, wait.peer);
    let list: Vec<String> = candidates.iter().map(|(a, why)| format!("{} ({why})", describe(*a))).collect();
    let list = list.join(", ");
    log::debug!("rank {rank}: addresses of rank {peer} in order: {list}");
    for round in 0u32.. {
        let mut failures = Vec::new();
        let mut wrong = 0;
        for (addr, why) in candidates {
            let who = Peer { rank, peer, address: describe(*addr) };
            match attempt(*addr, caller, sockets, wait, &who) {
                Ok(socket) => {
                    log::debug!("rank {rank}: tcp to rank {peer} at {} ({why})", who.address);
                    return Ok((socket, *addr, who));
                }
                Err(Failure::Final(e)) => return Err(e),
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
fn again(addr: SocketAddr, caller: &Caller, sockets: &SocketOptions, wait: &Wait<'_>, who: &Peer) -> Result<TcpStream> {
    for round in 0u32.. {
        match attempt(addr, caller, sockets, wait, who) {
            Ok(socket) => return Ok(socket),
            Err(Failure::Final(e)) => return Err(e),
            Err(Failure::Wrong(text)) if round >= ROUNDS => return Err(who.lost("connect", &text)),
            Err(Failure::Wrong(text) | Failure::Slow(text)) => {
                wait.pause(Duration::from_millis(25 << round.min(5)), || text.clone())?;
            }
        }
    }
    Err(who.lost("connect", "no further connection came about"))
}

fn attempt(
    addr: SocketAddr,
    caller: &Caller,
    sockets: &SocketOptions,
    wait: &Wait<'_>,
    who: &Peer,
) -> Result<TcpStream, Failure> {
    let mut socket = dial(addr, sockets, wait)?;
    let caller = caller.fresh()?;
    // A new connection's send buffer has room for it, and for the proof.
    let slow = |e: std::io::Error| Failure::Slow(e.to_string());
    socket.write_all(bytemuck::bytes_of(&caller.hello)).map_err(slow)?;
    let mut reply = hear(&mut socket, wait)?;
    let proven = matches!(reply, Reply::Prove(_));
    if let Reply::Prove(challenge) = reply {
        let proof = caller.answer(&challenge).map_err(Failure::Wrong)?;
        socket.write_all(&proof).map_err(slow)?;
        reply = hear(&mut socket, wait)?;
    }
    let protocol = |detail: String| Failure::Final(who.protocol("connect", detail));
    match reply {
        Reply::Welcome if proven => Ok(socket),
        // Whoever has not proven itself is not the peer: the next address may be.
        Reply::Stranger(detail) => Err(Failure::Wrong(format!("refused: {detail}"))),
        Reply::Refused(detail) | Reply::UseTcp(detail) if proven => Err(protocol(detail)),
        _ => Err(Failure::Wrong("expected a challenge, then a welcome".to_owned())),
    }
}

/// The next reply. Whoever does not speak our protocol is not the peer.
fn hear(socket: &mut TcpStream, wait: &Wait<'_>) -> Result<Reply, Failure> {
    let mut bytes = vec![0; Reply::HEAD];
    read_exact(socket, &mut bytes, wait)?;
    let mut detail = vec![0; Reply::detail_len(&bytes).map_err(Failure::Wrong)?];
    read_exact(socket, &mut detail, wait)?;
    bytes.extend(detail);
    Reply::parse(&bytes).map_err(Failure::Wrong)
}

fn dial(addr: SocketAddr, sockets: &SocketOptions, wait: &Wait<'_>) -> Result<TcpStream, Failure> {
    let os = |e: std::io::Error| match e.kind() {
        ErrorKind::ConnectionRefused => Failure::Wrong(e.to_string()),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Failure::Slow(format!("{e}{OTHER_NETWORK}")),
        _ => Failure::Slow(e.to_string()),
    };
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None).map_err(os)?;
    socket.set_nonblocking(true).map_err(os)?;
    sockets.dialing(&SockRef::from(&socket), addr);
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
    Ok(socket.into())
}

fn read_exact(socket: &mut TcpStream, bytes: &mut [u8], wait: &Wait<'_>) -> Result<(), Failure> {
    let mut got = 0;
    while let Some(rest) = bytes.get_mut(got..).filter(|r| !r.is_empty()) {
        match socket.read(rest) {
            Ok(0) => return Err(Failure::Wrong(CLOSED.to_owned())),
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                // The peer answers once its own thread asks for the link, so this lasts as long as the whole wait.
                let detail = || "it took the connection and has not asked for this link yet".to_owned();
                wait.ready(socket, PollFlags::IN, wait.left(), detail)?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(Failure::Slow(e.to_string())),
        }
    }
    Ok(())
}
