//! GIDs: the addresses of RDMA ports, the table that a port keeps of them, and which entry to use.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A global identifier: 16 bytes, written like an IPv6 address. On Ethernet it is one of the port's IP addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IPv4 address in a GID of the form `::ffff:a.b.c.d`.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// True for `fe80::/10`: valid on the local link only.
    pub fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl FromStr for Gid {
    type Err = String;

    fn from_str(text: &str) -> Result<Gid, String> {
        let address: Ipv6Addr =
            text.parse().map_err(|_| format!("'{text}' is no GID (written like an IPv6 address)"))?;
        Ok(Gid(address.octets()))
    }
}

/// Protocol that carries packets with this GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    Ib,
    /// RDMA in Ethernet frames of their own type: one link, no routers.
    RoceV1,
    /// RDMA in UDP datagrams to port 4791: goes wherever IP goes.
    RoceV2,
    /// Not reported by the kernel.
    Unknown,
}

impl GidKind {
    /// From a line of `/sys/class/infiniband/DEV/ports/P/gid_attrs/types/I`.
    pub fn from_sysfs(text: &str) -> GidKind {
        match text.trim() {
            "RoCE v2" => GidKind::RoceV2,
            "IB/RoCE v1" | "RoCE v1" => GidKind::RoceV1,
            "IB" => GidKind::Ib,
            _ => GidKind::Unknown,
        }
    }

    /// From `gid_type` of `struct ibv_gid_entry`.
    pub fn from_raw(raw: u32) -> GidKind {
        match raw {
            0 => GidKind::Ib,
            1 => GidKind::RoceV1,
            2 => GidKind::RoceV2,
            _ => GidKind::Unknown,
        }
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GidKind::Ib => "IB",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
            GidKind::Unknown => "?",
        })
    }
}

/// One entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidRow {
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Index in the port's table: the value for `sgid_index`.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// Protocol that carries packets with this GID.
    pub kind: GidKind,
    /// The network device that the address belongs to; empty on InfiniBand.
    pub netdev: String,
}

impl fmt::Display for GidRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.index, self.gid, self.kind)
    }
}

/// Rank of a GID, 0 for the best, and the reason for it in words.
pub type Rank = fn(&GidRow) -> (u8, &'static str);

/// The rank that the programs use, without milestone 02's explanations.
pub fn usual(row: &GidRow) -> (u8, &'static str) {
    match row.kind {
        GidKind::RoceV2 if row.gid.ipv4().is_some() => {
            (0, "RoCE v2 with an IPv4 address: UDP over IP, reachable wherever the address is")
        }
        GidKind::RoceV2 if !row.gid.is_link_local() => (1, "RoCE v2 with an IPv6 address"),
        GidKind::RoceV2 => (2, "RoCE v2 with a link-local address"),
        GidKind::Ib => (3, "InfiniBand"),
        GidKind::RoceV1 | GidKind::Unknown => (4, "no better one"),
    }
}

/// Chooses one of a port's rows and gives the reason: the row with index `wanted`, or else the best by `rank`.
///
/// # Errors
/// The table is empty, or has no such index; the error lists the existing rows.
pub fn choose<'a>(
    rows: &'a [GidRow],
    port: &str,
    wanted: Option<u32>,
    rank: Rank,
) -> Result<(&'a GidRow, String), String> {
    if rows.is_empty() {
        return Err(format!("the GID table of {port} is empty: is its network device up, and has it an address?"));
    }
    match wanted {
        Some(index) => {
            let row = rows.iter().find(|r| r.index == index).ok_or_else(|| {
                let there: Vec<String> = rows.iter().map(GidRow::to_string).collect();
                format!("the GID table of {port} has no entry {index}; it has {}", there.join(", "))
            })?;
            Ok((row, "--gid-index asked for it".to_owned()))
        }
        // `min_by_key` guarantees the first of equal rows.
        None => rows
            .iter()
            .min_by_key(|r| rank(r).0)
            .map(|row| (row, rank(row).1.to_owned()))
            .ok_or_else(|| format!("the GID table of {port} is empty")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(index: u32, gid: &str, kind: GidKind) -> GidRow {
        GidRow {
            device: "rxe0".to_owned(),
            port: 1,
            index,
            gid: gid.parse().expect("a GID"),
            kind,
            netdev: "eth0".to_owned(),
        }
    }

    #[test]
    fn gids_are_written_like_ipv6_addresses() {
        let gid: Gid = "::ffff:10.9.9.1".parse().expect("a GID");
        assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(10, 9, 9, 1)));
        assert_eq!(gid.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 9, 1]);
        assert_eq!(gid.to_string(), "::ffff:10.9.9.1");
        assert_eq!("fe80::1".parse::<Gid>().expect("a GID").ipv4(), None);
        assert!("10.9.9.1".parse::<Gid>().is_err() && "".parse::<Gid>().is_err());
    }

    #[test]
    fn an_index_that_is_not_there_names_those_that_are() {
        let rows = [row(0, "fe80::1", GidKind::RoceV2), row(4, "::ffff:10.0.0.1", GidKind::RoceV2)];
        assert_eq!(choose(&rows, "rxe0 port 1", Some(4), usual).expect("a row").0.index, 4);
        let text = choose(&rows, "rxe0 port 1", Some(1), usual).expect_err("sparse table");
        assert_eq!(
            text,
            "the GID table of rxe0 port 1 has no entry 1; it has 0 (fe80::1, RoCE v2), 4 (::ffff:10.0.0.1, RoCE v2)"
        );
    }

    #[test]
    fn types_as_the_kernel_writes_them() {
        assert_eq!(GidKind::from_sysfs("RoCE v2\n"), GidKind::RoceV2);
        assert_eq!(GidKind::from_sysfs("IB/RoCE v1\n"), GidKind::RoceV1);
        assert_eq!(GidKind::from_sysfs("something new"), GidKind::Unknown);
        assert_eq!(
            [0, 1, 2, 9].map(GidKind::from_raw),
            [GidKind::Ib, GidKind::RoceV1, GidKind::RoceV2, GidKind::Unknown]
        );
    }

    proptest! {
        #[test]
        fn every_gid_survives_being_written(bytes: [u8; 16]) {
            prop_assert_eq!(Gid(bytes).to_string().parse::<Gid>(), Ok(Gid(bytes)));
        }
    }
}
