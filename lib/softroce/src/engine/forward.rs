//! Packets that are handed on between cards of one host: a datagram of the slot's Unix socket.
//!
//! ```text
//! | source address 16 | port 2 | destination address 16 | port 2 | bytes of a packet 2 | packets |
//! ```
//! The addresses are those that the packets came with, as the ICRC and a datagram's GRH need them. IPv4 is mapped.
//! Numbers are big-endian, and the last packet may be shorter.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::wire::icrc::Route;

/// Bytes before the packets.
pub(super) const HEADER: usize = 38;

/// The header of packets of `segment` bytes each that came by `route`.
pub(super) fn header(route: &Route, segment: usize) -> [u8; HEADER] {
    let mut raw = [0; HEADER];
    for (at, end) in [(0, route.src), (18, route.dst)] {
        let ip = match end.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        raw[at..at + 16].copy_from_slice(&ip.octets());
        raw[at + 16..at + 18].copy_from_slice(&end.port().to_be_bytes());
    }
    raw[36..].copy_from_slice(&(segment as u16).to_be_bytes());
    raw
}

/// Takes a datagram apart: its route, bytes of a packet, the packets.
pub(super) fn parse(datagram: &[u8]) -> Option<(Route, usize, &[u8])> {
    let (header, packets) = datagram.split_first_chunk::<HEADER>()?;
    let end = |at: usize| -> Option<SocketAddr> {
        let ip: [u8; 16] = *header.get(at..)?.first_chunk()?;
        let port: [u8; 2] = *header.get(at + 16..)?.first_chunk()?;
        Some(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(ip)).to_canonical(), u16::from_be_bytes(port)))
    };
    let route = Route { src: end(0)?, dst: end(18)? };
    let segment = usize::from(u16::from_be_bytes(*header.get(36..)?.first_chunk()?));
    (segment > 0).then_some((route, segment, packets))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handed_on_is_understood() {
        for (src, dst) in [("192.0.2.1:50000", "192.0.2.2:4791"), ("[fe80::1]:50000", "[fe80::2]:4791")] {
            let route = Route { src: src.parse().expect("address"), dst: dst.parse().expect("address") };
            let mut datagram = header(&route, 4).to_vec();
            datagram.extend([1, 2, 3, 4, 5]);
            assert_eq!(parse(&datagram), Some((route, 4, &[1, 2, 3, 4, 5][..])));
            assert_eq!(parse(&datagram[..30]), None);
        }
    }
}
