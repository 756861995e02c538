//! The address of a device's port as other ranks learn it, and which two addresses reach each other.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::bootstrap::interface::pair_up;

/// A port of an RDMA device: how others reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbsAddress {
    /// Name of the device, for messages.
    pub device: String,
    /// Port, from 1.
    pub port: u8,
    /// Its global identifier: an IPv6 address, an IPv4 one mapped into it, or an InfiniBand prefix and port number.
    pub gid: [u8; 16],
    /// Leading bits of `gid` that all ports of the same subnet have in common.
    pub prefix: u8,
    /// Addressed by LID over InfiniBand, not by IP over Ethernet (RoCE v2).
    pub infiniband: bool,
    /// InfiniBand's local address.
    pub lid: u16,
}

impl VerbsAddress {
    /// The GID as an address, IPv4 where it is a mapped one.
    pub fn ip(&self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.gid)).to_canonical()
    }

    /// Returns true if packets from one reach the other without a router.
    pub(crate) fn same_subnet(&self, other: &VerbsAddress) -> bool {
        let bits = u32::from(self.prefix.max(other.prefix)).min(128);
        let different = u128::from_be_bytes(self.gid) ^ u128::from_be_bytes(other.gid);
        self.infiniband == other.infiniband && different.leading_zeros() >= bits
    }
}

impl fmt::Display for VerbsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ip = self.ip();
        let prefix = if ip.is_ipv4() { self.prefix.saturating_sub(96) } else { self.prefix };
        write!(f, "{} port {} ({ip}/{prefix})", self.device, self.port)
    }
}

/// Pairs of indices into `ours` and `theirs` that share a subnet. Both ends compute the same pairs, the lower rank with
/// itself as `ours`: pairs of the same index in both lists first, so that several links spread over several devices.
pub(crate) fn pairs(ours: &[VerbsAddress], theirs: &[VerbsAddress]) -> Vec<(usize, usize)> {
    pair_up(ours.len(), theirs.len(), |o, t| ours.get(o).zip(theirs.get(t)).is_some_and(|(o, t)| o.same_subnet(t)))
}

/// A list of addresses in words.
pub(crate) fn list(addresses: &[VerbsAddress]) -> String {
    match addresses {
        [] => "none".to_owned(),
        some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(device: &str, ip: [u8; 4], prefix: u8) -> VerbsAddress {
        let gid = Ipv4Addr::from(ip).to_ipv6_mapped().octets();
        VerbsAddress { device: device.to_owned(), port: 1, gid, prefix: 96 + prefix, infiniband: false, lid: 0 }
    }

    #[test]
    fn addresses_of_one_subnet_reach_each_other() {
        let a = address("a", [10, 1, 12, 1], 24);
        assert!(a.same_subnet(&address("b", [10, 1, 12, 200], 24)));
        assert!(!a.same_subnet(&address("b", [10, 1, 13, 1], 24)));
        // The narrower one decides.
        assert!(!a.same_subnet(&address("b", [10, 1, 13, 1], 16)));
        assert!(!a.same_subnet(&VerbsAddress { infiniband: true, ..a.clone() }));
        assert_eq!(a.to_string(), "a port 1 (10.1.12.1/24)");
    }

    #[test]
    fn a_triangle_has_one_pair_per_side_and_a_line_has_none_between_its_ends() {
        let a = [address("ab", [10, 1, 12, 1], 24), address("ac", [10, 1, 31, 2], 24)];
        let b = [address("ba", [10, 1, 12, 2], 24), address("bc", [10, 1, 23, 1], 24)];
        let c = [address("cb", [10, 1, 23, 2], 24), address("ca", [10, 1, 31, 1], 24)];
        assert_eq!(pairs(&a, &b), [(0, 0)]);
        assert_eq!(pairs(&b, &c), [(1, 0)]);
        assert_eq!(pairs(&a, &c), [(1, 1)]);
        assert_eq!(pairs(&a[..1], &c), []);
        assert_eq!(list(&a[..1]), "ab port 1 (10.1.12.1/24)");
    }

    #[test]
    fn two_nics_give_two_pairs() {
        let host = |last: u8| [address("x0", [10, 0, 0, last], 24), address("x1", [10, 0, 0, last + 100], 24)];
        assert_eq!(pairs(&host(1), &host(2)), [(0, 0), (1, 1)]);
    }
}
