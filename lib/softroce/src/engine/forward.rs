//! Packets that are handed on between RDMA devices of one host: a datagram to the slot's address, or to its Unix socket
//! where there is no loopback network. The Unix socket's queue holds ten, which a long message overflows.
//!
//! ```text
//! | mark 1 | source address 16 | port 2 | destination address 16 | port 2 | bytes of a packet 2 | packets |
//! ```
//! The addresses are those that the packets came with, as the ICRC and a datagram's GRH need them. IPv4 is mapped.
//! Numbers are big-endian, and the last packet may be shorter.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::slot;
use crate::wire::Bth;
use crate::wire::icrc::Route;

/// Bytes before the packets.
pub(super) const HEADER: usize = 39;
/// An opcode of no service: packets that were sent to the slot's address by their sender begin with none.
const MARK: u8 = 0xfd;
/// Bytes of a datagram at most: of UDP over IPv4.
pub(super) const MOST: usize = 65_507;

/// The header of packets of `segment` bytes each that came by `route`.
pub(super) fn header(route: &Route, segment: usize) -> [u8; HEADER] {
    let mut raw = [0; HEADER];
    raw[0] = MARK;
    for (at, end) in [(1, route.src), (19, route.dst)] {
        let ip = match end.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        raw[at..at + 16].copy_from_slice(&ip.octets());
        raw[at + 16..at + 18].copy_from_slice(&end.port().to_be_bytes());
    }
    raw[37..].copy_from_slice(&(segment as u16).to_be_bytes());
    raw
}

/// Returns true if a datagram to the slot's address was handed on.
pub(super) fn is_one(datagram: &[u8]) -> bool {
    datagram.first() == Some(&MARK)
}

/// The packets at the start of `bytes`, of `segment` bytes each, that are all for slot `owner` and fit a datagram of
/// `room` bytes. Handed on together they take one entry of the few in the other RDMA device's queue.
pub(super) fn run(bytes: &[u8], segment: usize, room: usize, owner: u32) -> &[u8] {
    let of_owner = |packet: &&[u8]| Bth::dest_qpn_of(packet).map(slot::of) == Some(owner);
    let count = bytes.chunks(segment).take_while(of_owner).count().min((room - HEADER) / segment);
    bytes.get(..count * segment).unwrap_or(bytes)
}

/// Takes a datagram apart: its route, bytes of a packet, the packets.
pub(super) fn parse(datagram: &[u8]) -> Option<(Route, usize, &[u8])> {
    let (header, packets) = datagram.split_first_chunk::<HEADER>().filter(|_| is_one(datagram))?;
    let end = |at: usize| -> Option<SocketAddr> {
        let ip: [u8; 16] = *header.get(at..)?.first_chunk()?;
        let port: [u8; 2] = *header.get(at + 16..)?.first_chunk()?;
        Some(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(ip)).to_canonical(), u16::from_be_bytes(port)))
    };
    let route = Route { src: end(1)?, dst: end(19)? };
    let segment = usize::from(u16::from_be_bytes(*header.get(37..)?.first_chunk()?));
    (segment > 0).then_some((route, segment, packets))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_for_the_same_card_are_handed_on_together() {
        const SEGMENT: usize = 20;
        let packet = |owner: u32, index: u32, len: usize| -> Vec<u8> {
            let mut packet = vec![0; len];
            packet[4..8].copy_from_slice(&(owner << slot::INDEX_BITS | index).to_be_bytes());
            packet
        };
        let bytes = [(5, 1, SEGMENT), (5, 2, SEGMENT), (6, 1, SEGMENT), (5, 1, SEGMENT), (5, 1, 12)];
        let bytes: Vec<u8> = bytes.into_iter().flat_map(|(owner, index, len)| packet(owner, index, len)).collect();
        let run_at = |first: usize, owner, room| run(&bytes[first * SEGMENT..], SEGMENT, room, owner).len();
        assert_eq!(run_at(0, 5, 1 << 16), 2 * SEGMENT, "up to one for another card");
        assert_eq!(run_at(2, 6, 1 << 16), SEGMENT);
        assert_eq!(run_at(3, 5, 1 << 16), SEGMENT + 12, "a short last one with them");
        assert_eq!(run_at(3, 5, HEADER + 2 * SEGMENT - 1), SEGMENT, "as many as fit");
        assert_eq!(run_at(0, 6, 1 << 16), 0);
        // A packet that is too short for a number goes nowhere.
        assert_eq!(run(&bytes[..7], SEGMENT, 1 << 16, 0), &[] as &[u8]);
    }

    #[test]
    fn what_is_handed_on_is_understood() {
        for (src, dst) in [("192.0.2.1:50000", "192.0.2.2:4791"), ("[fe80::1]:50000", "[fe80::2]:4791")] {
            let route = Route { src: src.parse().expect("address"), dst: dst.parse().expect("address") };
            let mut datagram = header(&route, 4).to_vec();
            datagram.extend([1, 2, 3, 4, 5]);
            assert_eq!(parse(&datagram), Some((route, 4, &[1, 2, 3, 4, 5][..])));
            assert!(is_one(&datagram) && parse(&datagram[..30]).is_none() && parse(&datagram[1..]).is_none());
        }
    }
}
