//! Global identifiers: what a port is addressed by.

use std::net::{IpAddr, Ipv6Addr};

use super::ffi;

/// A port's address: an IPv6 address, or an IPv4 one mapped into it, or an InfiniBand subnet prefix and port number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

impl Gid {
    /// As an address, IPv4 where it is a mapped one.
    pub(crate) fn ip(&self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.0)).to_canonical()
    }

    pub(super) fn raw(&self) -> ffi::ibv_gid {
        ffi::ibv_gid { raw: self.0 }
    }
}

/// Format on the wire of packets to this GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GidType {
    Infiniband,
    RoceV1,
    /// UDP over IP: what can be routed.
    RoceV2,
}

/// An entry of a port's table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GidEntry {
    pub(crate) gid: Gid,
    pub(crate) index: u32,
    pub(crate) port: u32,
    pub(crate) kind: GidType,
}

impl GidEntry {
    pub(super) fn new(entry: ffi::ibv_gid_entry) -> GidEntry {
        GidEntry {
            // SAFETY: both forms of a GID are 16 bytes.
            gid: Gid(unsafe { entry.gid.raw }),
            index: entry.gid_index,
            port: entry.port_num,
            kind: match entry.gid_type {
                ffi::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                ffi::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                _ => GidType::Infiniband,
            },
        }
    }
}
