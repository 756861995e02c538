//! Addresses of ports, and the path of a packet between two of them.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// A port's address: an IPv6 address, or an IPv4 one mapped into it (annex A17.4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// As an address, IPv4 where it is a mapped one.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.0)).to_canonical()
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Gid {
        Gid(match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        })
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Ipv6Addr::from(self.0))
    }
}

/// The path to a peer, as an address handle describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Our address.
    pub src: IpAddr,
    /// The peer's.
    pub dst: IpAddr,
    /// Index of our address in the port's table.
    pub sgid_index: u8,
    /// IPv4 type of service or IPv6 traffic class.
    pub traffic_class: u8,
    /// IPv4 TTL or IPv6 hop limit. 0 and 1 are the system's: programs set 1 without a thought of routers (rdma-core's
    /// pingpongs do), and with verbs of the kernel the route decides, too.
    pub hop_limit: u8,
    /// IPv6 flow label: kept for queries, not sent. The system takes labels only from processes that lease them.
    pub flow_label: u32,
    /// True if the peer is on this host.
    pub local: bool,
}
