//! Invariant CRC: the four bytes behind every packet (annex A17.3.3, "ICRC").
//!
//! It is the CRC-32 of Ethernet over eight bytes of ones (in place of InfiniBand's local route header), the IP header,
//! the UDP header and the packet, with ones where a router may change something: IPv4 type of service, TTL and
//! checksum; IPv6 traffic class, flow label and hop limit; the UDP checksum; `resv8a` of the BTH. It lies on the wire
//! with the lowest byte first.
//!
//! **The IPv4 identification is covered**, and a program behind a UDP socket neither writes nor reads it. So:
//!
//! * *Sending.* Linux gives a datagram of an unconnected socket with `IP_PMTUDISC_DO` the flag DF and the
//!   identification 0. A batch of UDP segmentation offload leaves as datagrams 0, 1, 2 and so on (seen with a packet
//!   socket on Linux 6.18: the loopback device and between two hosts; a *connected* socket counts from a random
//!   number). [`Icrc::seal`] takes the number.
//! * *Receiving.* Others count: rxe takes the kernel's next number. A CRC is linear, so the difference between the CRC
//!   that came and the one for a guess depends on the identification alone, and running the CRC backwards over the
//!   bytes behind that field gives the only candidate. [`Icrc::check`] accepts a packet when a candidate of 16 bits
//!   explains all 32 bits of the difference. A damaged packet passes with probability 2^-16, on top of UDP's checksum,
//!   where it would be 2^-32.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crc32fast::Hasher;

use super::Bth;
use super::packet::ICRC_LEN;

const UDP_HEADER: usize = 8;
const DONT_FRAGMENT: u16 = 0x4000;
/// Identifications from 0 on whose CRCs are kept: those of a batch.
const KEPT: u16 = 64;

/// Both ends of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
}

/// An IPv4 header without options with DF, its checksum 0. `udp_len` is the length in the UDP header.
pub(super) fn ipv4_header(src: Ipv4Addr, dst: Ipv4Addr, udp_len: u16, id: u16, ttl: u8) -> [u8; 20] {
    let mut ip = [0; 20];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&udp_len.saturating_add(20).to_be_bytes());
    ip[4..6].copy_from_slice(&id.to_be_bytes());
    ip[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
    ip[8] = ttl;
    ip[9] = libc::IPPROTO_UDP as u8;
    ip[12..16].copy_from_slice(&src.octets());
    ip[16..].copy_from_slice(&dst.octets());
    ip
}

/// An IPv6 header.
pub(super) fn ipv6_header(src: Ipv6Addr, dst: Ipv6Addr, udp_len: u16, hops: u8) -> [u8; 40] {
    let mut ip = [0; 40];
    ip[0] = 0x60;
    ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
    ip[6] = libc::IPPROTO_UDP as u8;
    ip[7] = hops;
    ip[8..24].copy_from_slice(&src.octets());
    ip[24..].copy_from_slice(&dst.octets());
    ip
}

/// The IP header of a packet with a UDP length of `udp_len`.
pub(crate) fn ip_header(route: &Route, udp_len: u16, id: u16) -> Vec<u8> {
    let v6 = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    match (route.src.ip(), route.dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ipv4_header(src, dst, udp_len, id, 64).to_vec(),
        (src, dst) => ipv6_header(v6(src), v6(dst), udp_len, 64).to_vec(),
    }
}

/// The ICRC of packets of one route: the CRC of what does not change is worked out once per length.
#[derive(Debug, Clone)]
pub struct Icrc {
    route: Route,
    /// Length of the UDP payload that `prefixes` are for.
    cached: usize,
    /// The CRC before the BTH, by identification.
    prefixes: Vec<Hasher>,
}

impl Icrc {
    /// For packets from `route.src` to `route.dst`.
    #[must_use]
    pub fn new(route: Route) -> Icrc {
        Icrc { route, cached: 0, prefixes: Vec::new() }
    }

    /// The route.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The ICRC of the packet whose bytes without it are `head` and then `rest` (`head` has at least the BTH), sent
    /// with the IPv4 identification `id`; as it lies on the wire.
    pub fn seal<'a>(
        &mut self,
        head: &[u8],
        rest: impl IntoIterator<Item = &'a [u8]> + Clone,
        id: u16,
    ) -> [u8; ICRC_LEN] {
        let len = head.len() + rest.clone().into_iter().map(<[u8]>::len).sum::<usize>() + ICRC_LEN;
        let mut crc = self.start(len, id, head);
        for part in rest {
            crc.update(part);
        }
        crc.finalize().to_le_bytes()
    }

    /// Returns true if `packet`, a UDP payload with its ICRC, arrived as it was sent. `likely` is the IPv4
    /// identification that an RDMA device of this crate would have sent it with: its index in the batch that it came
    /// in.
    pub fn check(&mut self, packet: &[u8], likely: u16) -> bool {
        let Some((body, icrc)) = packet.split_last_chunk::<ICRC_LEN>() else { return false };
        if body.len() < Bth::LEN {
            return false;
        }
        let v4 = self.route.src.is_ipv4();
        let crc = self.start(packet.len(), if v4 { likely } else { 0 }, body).finalize();
        let difference = crc ^ u32::from_le_bytes(*icrc);
        difference == 0 || (v4 && explained_by_id(difference, packet.len()))
    }

    /// The CRC up to and with `head`, the masked BTH included.
    fn start(&mut self, len: usize, id: u16, head: &[u8]) -> Hasher {
        if self.cached != len {
            self.cached = len;
            self.prefixes.clear();
        }
        let udp_len = (len + UDP_HEADER) as u16;
        // Batches count from 0; other numbers are not kept.
        if usize::from(id) == self.prefixes.len() && id < KEPT {
            self.prefixes.push(pseudo_header(&self.route, udp_len, id));
        }
        let mut crc = match self.prefixes.get(usize::from(id)) {
            Some(kept) => kept.clone(),
            None => pseudo_header(&self.route, udp_len, id),
        };
        if let Some((bth, rest)) = head.split_first_chunk::<{ Bth::LEN }>() {
            // Congestion bits and the rest of resv8a: ones.
            let mut masked = *bth;
            masked[4] = 0xff;
            crc.update(&masked);
            crc.update(rest);
        }
        crc
    }
}

/// Returns true if some other identification explains the difference between two CRCs of a packet of `len` bytes of
/// UDP.
fn explained_by_id(difference: u32, len: usize) -> bool {
    // From the identification, with its two bytes, to the end of what is covered. Two bytes into an empty register:
    // what they make of it is an image of 16 dimensions. The low 16 bits of a register shifted back over them must be
    // the identification, and nothing else may be left.
    let from = 20 - 4 + UDP_HEADER + len - ICRC_LEN;
    back_over_zeros(difference, from) >> 16 == 0
}

/// The CRC over everything before the BTH.
fn pseudo_header(route: &Route, udp_len: u16, id: u16) -> Hasher {
    let mut crc = Hasher::new();
    crc.update(&[0xff; 8]);
    match (route.src.ip(), route.dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let mut ip = ipv4_header(src, dst, udp_len, id, 0xff);
            ip[1] = 0xff;
            ip[10..12].fill(0xff);
            crc.update(&ip);
        }
        (src, dst) => {
            let v6 = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            let mut ip = ipv6_header(v6(src), v6(dst), udp_len, 0xff);
            ip[0] |= 0x0f;
            ip[1..4].fill(0xff);
            crc.update(&ip);
        }
    }
    let mut udp = [0xff; UDP_HEADER];
    udp[..2].copy_from_slice(&route.src.port().to_be_bytes());
    udp[2..4].copy_from_slice(&route.dst.port().to_be_bytes());
    udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
    crc.update(&udp);
    crc
}

/// A linear map of the CRC's register over GF(2): the image of each bit.
#[derive(Clone, Copy)]
struct Matrix([u32; 32]);

/// The polynomial of Ethernet's CRC, bits reversed.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Maps back over 2^n bytes of zeros, for lengths of 16 bits and a little more.
static BACK: [Matrix; 17] = {
    // One step forward is r -> r >> 1, and the polynomial added where a 1 fell out. The polynomial's top bit is set, so
    // the top bit of the result shows whether it did.
    let mut bit = Matrix([0; 32]);
    let mut i = 0;
    while i < 32 {
        bit.0[i] = if i == 31 { (1 << 31 ^ POLYNOMIAL) << 1 | 1 } else { 1 << (i + 1) };
        i += 1;
    }
    let mut back = [bit.twice().twice().twice(); 17];
    let mut n = 1;
    while n < 17 {
        back[n] = back[n - 1].twice();
        n += 1;
    }
    back
};

/// Takes a register from behind `bytes` bytes of zeros to before them.
fn back_over_zeros(register: u32, bytes: usize) -> u32 {
    let powers = BACK.iter().enumerate().filter(|(n, _)| bytes >> n & 1 == 1);
    powers.fold(register, |register, (_, back)| back.apply(register))
}

impl Matrix {
    const fn apply(&self, register: u32) -> u32 {
        let (mut sum, mut i) = (0, 0);
        while i < 32 {
            sum ^= self.0[i] & (register >> i & 1).wrapping_neg();
            i += 1;
        }
        sum
    }

    /// The map, and again.
    const fn twice(&self) -> Matrix {
        let mut images = [0; 32];
        let mut i = 0;
        while i < 32 {
            images[i] = self.apply(self.0[i]);
            i += 1;
        }
        Matrix(images)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn route(src: &str, dst: &str) -> Route {
        Route { src: src.parse().expect("address"), dst: dst.parse().expect("address") }
    }

    fn hex(digits: &str) -> Vec<u8> {
        let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ascii"), 16).expect("hex"))
            .collect()
    }

    /// The CRC-32 bit by bit.
    fn plain_crc(bytes: impl IntoIterator<Item = u8>) -> u32 {
        !bytes.into_iter().fold(!0u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(byte), |r, _| if r & 1 == 1 { r >> 1 ^ POLYNOMIAL } else { r >> 1 })
        })
    }

    /// A congestion notification that a ConnectX-4 Lx sent: identification 0x718c, DF, type of service 0xc2, source
    /// port 0.
    #[test]
    fn agrees_with_a_packet_of_an_adapter() {
        let packet = hex("8100ffff 40000118 00000000 00000000000000000000000000000000 82fd002a");
        let mut icrc = Icrc::new(route("10.0.17.1:0", "10.0.18.1:4791"));
        assert_eq!(icrc.seal(&packet[..28], [], 0x718c), [0x82, 0xfd, 0x00, 0x2a]);
        assert!(icrc.check(&packet, 0), "its identification is found");
        for bit in 0..packet.len() * 8 {
            let mut damaged = packet.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(icrc.check(&damaged, 0), bit / 8 == 4, "bit {bit}; only resv8a may change");
        }
    }

    /// A UC SEND_ONLY between two ConnectX, identification 1144.
    #[test]
    fn agrees_with_a_packet_that_has_padding() {
        let payload = b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\x00\x00";
        let mut head = hex("2460ffff 000000d3 00").to_vec();
        head.extend(&13_571_856u32.to_be_bytes()[1..]);
        let mut icrc = Icrc::new(route("192.168.0.7:49152", "192.168.0.7:4791"));
        assert_eq!(icrc.seal(&head, [payload.as_slice()], 1144), 0x78f3_53f3u32.to_be_bytes());
    }

    proptest! {
        #[test]
        fn agrees_with_the_plain_crc_over_ipv6(body in prop::collection::vec(any::<u8>(), 12..200)) {
            let route = route("[fd00::1]:50000", "[fd00::2]:4791");
            let mut icrc = Icrc::new(route);
            let udp_len = (body.len() + 12) as u16;
            let mut covered = vec![0xff; 8];
            covered.extend(hex("6fffffff"));
            covered.extend(udp_len.to_be_bytes());
            covered.extend(hex("11ff fd000000000000000000000000000001 fd000000000000000000000000000002"));
            covered.extend(50_000u16.to_be_bytes());
            covered.extend(4791u16.to_be_bytes());
            covered.extend(udp_len.to_be_bytes());
            covered.extend([0xff; 2]);
            let bth = covered.len();
            covered.extend(&body);
            covered[bth + 4] = 0xff;
            let (head, rest) = body.split_at(12);
            prop_assert_eq!(icrc.seal(head, [rest], 0), plain_crc(covered).to_le_bytes());
        }

        #[test]
        fn any_identification_is_found(id: u16, len in 12usize..300) {
            let mut icrc = Icrc::new(route("192.0.2.1:50000", "192.0.2.2:4791"));
            let mut packet = vec![7; len];
            let crc = icrc.seal(&packet, [], id);
            packet.extend(crc);
            prop_assert!(icrc.check(&packet, 0) && icrc.check(&packet, id) && icrc.check(&packet, 5));
        }
    }

    #[test]
    fn damage_is_rarely_taken_for_an_identification() {
        let mut icrc = Icrc::new(route("192.0.2.1:50000", "192.0.2.2:4791"));
        let mut packet = vec![7; 100];
        let crc = icrc.seal(&packet, [], 0);
        packet.extend(crc);
        let passed = (0..20_000u32)
            .filter(|n| {
                let mut damaged = packet.clone();
                let burst = n.wrapping_mul(0x9e37_79b1) | 1;
                for (byte, damage) in damaged[40..].iter_mut().zip(burst.to_le_bytes()) {
                    *byte ^= damage;
                }
                icrc.check(&damaged, 0)
            })
            .count();
        assert!(passed <= 5, "{passed} of 20000");
    }
}
