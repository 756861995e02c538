//! Global route header: the 40 bytes before a datagram's payload in its receive (InfiniBand specification, 8.3,
//! 11.4.1.2).
//!
//! RoCEv2 has an IP header in its place. For IPv6 that header is the GRH but for its next header; for IPv4 the receive
//! has 20 bytes of nothing and then the 20 bytes of the IPv4 header (annex A17.4.5.2), as adapters and rxe deliver it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::icrc::{Route, ipv4_header, ipv6_header};

/// Bytes of the header.
pub const LEN: usize = 40;

/// The header of a datagram that came by `route` with `udp_len` bytes of UDP, its header included.
#[must_use]
pub fn build(route: &Route, udp_len: u16) -> [u8; LEN] {
    let mut grh = [0; LEN];
    match (route.src.ip(), route.dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            grh[20..].copy_from_slice(&ipv4_header(src, dst, udp_len, 0, 64));
        }
        (src, dst) => grh.copy_from_slice(&ipv6_header(v6(src), v6(dst), udp_len, 64)),
    }
    grh
}

/// The addresses in a header that was received: of the sender, then ours. `None` where it is neither of the layouts.
#[must_use]
pub fn addresses(grh: &[u8; LEN]) -> Option<(IpAddr, IpAddr)> {
    let quad = |at: usize| grh.get(at..).and_then(|b| b.first_chunk::<4>()).map(|b| Ipv4Addr::from(*b));
    let sixteen = |at: usize| grh.get(at..).and_then(|b| b.first_chunk::<16>()).map(|b| Ipv6Addr::from(*b));
    match (grh[0] >> 4, grh[20] >> 4) {
        (6, _) => Some((sixteen(8)?.into(), sixteen(24)?.into())),
        (0, 4) => Some((quad(32)?.into(), quad(36)?.into())),
        _ => None,
    }
}

fn v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_give_the_addresses_back() {
        for (src, dst) in [("192.0.2.1:49152", "192.0.2.2:4791"), ("[fe80::1]:49152", "[fe80::2]:4791")] {
            let route = Route { src: src.parse().expect("address"), dst: dst.parse().expect("address") };
            let grh = build(&route, 100);
            assert_eq!(addresses(&grh), Some((route.src.ip(), route.dst.ip())));
        }
    }
}
