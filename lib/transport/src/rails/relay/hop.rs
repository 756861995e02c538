//! Making of a relayed stream: the request to a relay for the rest of the path, and a relay's part in it.

use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;

use super::Relays;
use super::forwarder::Forwarder;
use super::routes::MOST;
use crate::bootstrap::interface::{LocalAddress, in_subnet};
use crate::handshake::{Caller, Hello, Purpose, Reply};
use crate::seal::{self, Socket};
use crate::stream::{Failure, greet, read_exact, recv_reply};
use crate::tcp::{describe, open};
use crate::wait::Wait;
use tinynccl_plan::error::Error;
use tinynccl_sys::secret::Proof;

/// Request that a stream be relayed. Attached is the rest of its route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::rails) struct RelayRequest;

impl Purpose for RelayRequest {
    const NUMBER: u32 = 3;
    const SEALABLE: bool = false;
}

/// Acceptors on a path, in the order in which it passes them: 80 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::rails) struct SourceRoute {
    count: u8,
    reserved: [u8; 7],
    /// Addresses (of IPv4 as IPv6 maps it) and ports, of which `count` are used.
    hops: [[u8; 18]; MOST + 1],
}

impl SourceRoute {
    pub(in crate::rails) const BYTES: usize = size_of::<SourceRoute>();

    /// Encodes as many acceptors as fit, which are all of a path.
    pub(in crate::rails) fn new(acceptors: &[SocketAddr]) -> SourceRoute {
        let mut hops = [[0; 18]; MOST + 1];
        for (to, acceptor) in hops.iter_mut().zip(acceptors) {
            let ip = match acceptor.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let bytes = ip.octets().into_iter().chain(acceptor.port().to_le_bytes());
            to.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
        }
        SourceRoute { count: acceptors.len().min(MOST + 1) as u8, reserved: [0; 7], hops }
    }

    /// Decodes the acceptors on a path; an error says what is wrong.
    pub(in crate::rails) fn parse(bytes: &[u8]) -> Result<Vec<SocketAddr>, String> {
        let hops: SourceRoute = bytemuck::try_pod_read_unaligned(bytes)
            .map_err(|_| format!("expected a route of {} bytes, got {}", SourceRoute::BYTES, bytes.len()))?;
        let count = usize::from(hops.count);
        if count == 0 || count > MOST + 1 {
            return Err(format!("expected 1 to {} acceptors on the route, got {count}", MOST + 1));
        }
        let acceptor = |stop: &[u8; 18]| {
            let [ip @ .., low, high] = *stop;
            let ip: Ipv6Addr = ip.into();
            SocketAddr::new(ip.to_canonical(), u16::from_le_bytes([low, high]))
        };
        Ok(hops.hops.iter().take(count).map(acceptor).collect())
    }
}

/// Returns the address of our port in whose subnet `ip` is.
fn nearest(ports: &[LocalAddress], ip: IpAddr) -> Option<IpAddr> {
    let near = |p: &&LocalAddress| !p.loopback && p.ip != ip && in_subnet(p.ip, p.prefix, ip);
    ports.iter().find(near).map(|p| p.ip)
}

/// Connects to the last of these acceptors, through the others; the handshake with it is still to come.
pub(in crate::rails) fn through(relays: &Relays, acceptors: &[SocketAddr], wait: &Wait<'_>) -> Result<Socket, Failure> {
    let Some((first, rest)) = acceptors.split_first() else { return Err(Failure::Wrong("an empty route".to_owned())) };
    let from = nearest(&relays.ports, first.ip())
        .ok_or_else(|| Failure::Wrong(format!("no port of this node is in the subnet of {}", first.ip())))?;
    let named = |f: Failure| match f {
        // Another route may do.
        Failure::Wrong(text) | Failure::Refused(text) => Failure::Wrong(format!("{}: {text}", describe(*first))),
        Failure::Slow(text) => Failure::Slow(format!("{}: {text}", describe(*first))),
        other => other,
    };
    let mut socket = open(Some(from), *first, &relays.sockets, wait).map_err(named)?;
    if rest.is_empty() {
        return Ok(socket);
    }
    let route = SourceRoute::new(rest);
    let caller = Caller::new(&RelayRequest, relays.key, bytemuck::bytes_of(&route));
    greet(&mut socket, &caller, wait).map_err(named)?;
    Ok(socket)
}

/// Starts making the rest of a stream's path. Called by the acceptor, so it does not block.
pub(in crate::rails) fn start(relays: &Arc<Relays>, mut near: TcpStream, acceptors: Vec<SocketAddr>) {
    if !near.peer_addr().is_ok_and(|from| nearest(&relays.ports, from.ip()).is_some()) {
        return refuse(&mut near, "it relays for neighbours only, from addresses in subnets of its ports");
    }
    let ours = relays.clone();
    let make = move |near| make(&ours, near, &acceptors);
    if let Err((mut near, why)) = relays.setups.start("tinynccl-hop".to_owned(), near, Forwarder::streams, make) {
        refuse(&mut near, &why);
    }
}

fn refuse(near: &mut TcpStream, why: &str) {
    let from = near.peer_addr().map_or("?".to_owned(), describe);
    log::warn!("net: does not relay for {from}: {why}");
    // It has gone, or receives it.
    let _ = near.write_all(&Reply::Refused(why.to_owned()).to_bytes());
}

fn make(relays: &Arc<Relays>, mut near: TcpStream, acceptors: &[SocketAddr]) {
    let stopped = || relays.setups.is_stopped().then(|| Error::invalid("relay", "this node is shutting down"));
    let wait = Wait::without_ranks(relays.limit, &stopped);
    let mut far = match through(relays, acceptors, &wait) {
        Ok(far) => far.into_plain(),
        Err(f) => return refuse(&mut near, &f.text()),
    };
    let ends = |s: &TcpStream| s.peer_addr().map_or("?".to_owned(), describe);
    let name = format!("a stream from {} to {}", ends(&near), ends(&far));
    if let Err(f) = relay_handshake(&mut near, &mut far, &wait) {
        return log::warn!("net: does not relay {name}: {}", f.text());
    }
    match relays.setups.forwarder(|| Forwarder::start(relays.patience)) {
        _ if relays.setups.is_stopped() => {}
        Ok(forwarder) => {
            log::info!("net: relays {name}");
            forwarder.add(name, near, far);
        }
        Err(e) => log::warn!("net: does not relay {name}: {e}"),
    }
}

/// Passes the handshake of dialer and listener on, and nothing else before the listener's welcome: an unauthenticated
/// connection, which has no handle, gets no further than to an acceptor of this library. Of an encrypted one the relay
/// cannot tell the welcome from a rejection, behind which the listener closes it: it passes on that and what follows.
pub(super) fn relay_handshake(near: &mut TcpStream, far: &mut TcpStream, wait: &Wait<'_>) -> Result<(), Failure> {
    let slow = |e: std::io::Error| Failure::Slow(e.to_string());
    near.write_all(&Reply::Welcome.to_bytes()).map_err(slow)?;
    let mut hello = [0; Hello::BYTES];
    read_exact(near, &mut hello, wait, "the dialer has not sent its hello")?;
    let malformed = |why: Option<String>| Failure::Wrong(why.unwrap_or_else(|| "expected a hello".to_owned()));
    let parsed = Hello::parse(&hello).map_err(malformed)?;
    let attached = parsed.attached();
    let mut hello = hello.to_vec();
    if parsed.is_sealed() {
        let mut message = [0; seal::MESSAGE];
        read_exact(near, &mut message, wait, "the dialer has not sent its part of the encryption")?;
        hello.extend(message);
    }
    far.write_all(&hello).map_err(slow)?;
    let reply = recv_reply(far, wait)?;
    near.write_all(&reply.to_bytes()).map_err(slow)?;
    if !matches!(reply, Reply::Prove(..)) {
        return Err(Failure::Wrong("the listener rejected it".to_owned()));
    }
    // From here on records, if the ends encrypt: a relay cannot read them.
    let sealed = if parsed.is_sealed() { seal::RECORD } else { 0 };
    let mut proof = vec![0; size_of::<Proof>() + attached + sealed];
    read_exact(near, &mut proof, wait, "the dialer has not sent its proof")?;
    far.write_all(&proof).map_err(slow)?;
    if parsed.is_sealed() {
        return Ok(());
    }
    let reply = recv_reply(far, wait)?;
    near.write_all(&reply.to_bytes()).map_err(slow)?;
    if reply == Reply::Welcome { Ok(()) } else { Err(Failure::Wrong("the listener rejected it".to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn source_routes_survive_their_text() {
        let acceptors: Vec<SocketAddr> = ["10.0.1.2:5", "[fd00::1]:65535", "10.0.2.2:1", "10.0.3.2:2"]
            .iter()
            .map(|acceptor| acceptor.parse().unwrap())
            .collect();
        for count in 1..=4 {
            let route = SourceRoute::new(&acceptors[..count]);
            assert_eq!(SourceRoute::parse(bytemuck::bytes_of(&route)).unwrap(), acceptors[..count]);
        }
        assert!(SourceRoute::parse(bytemuck::bytes_of(&SourceRoute::new(&[]))).is_err());
    }

    #[test]
    fn only_what_is_in_a_subnet_of_ours_is_dialed() {
        let port = |ip: &str, prefix, loopback| LocalAddress {
            interface: "x".to_owned(),
            ip: ip.parse().unwrap(),
            prefix,
            loopback,
        };
        let ports = [port("10.0.1.1", 30, false), port("127.0.0.1", 8, true)];
        let from = |ip: &str| nearest(&ports, ip.parse().unwrap()).map(|ip| ip.to_string());
        assert_eq!(from("10.0.1.2").as_deref(), Some("10.0.1.1"));
        for other in ["10.0.1.1", "10.0.2.1", "127.0.0.1", "127.0.0.2", "::1", "8.8.8.8"] {
            assert_eq!(from(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(mut text in proptest::array::uniform(any::<u8>()), count in 0u8..8) {
            text[0] = count;
            let _: &[u8; SourceRoute::BYTES] = &text;
            prop_assert!(SourceRoute::parse(&text[1..]).is_err());
            match SourceRoute::parse(&text) {
                Ok(acceptors) => prop_assert_eq!(acceptors.len(), usize::from(count)),
                Err(_) => prop_assert!(count == 0 || count > 4),
            }
        }
    }
}
