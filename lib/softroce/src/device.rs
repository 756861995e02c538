//! RDMA devices: one for each interface that is up and has an address.

use std::net::IpAddr;

use crate::error::{Error, Result};
use crate::gids::GidTable;
use crate::interface;
use crate::path::Gid;

/// Interfaces to offer, separated by commas, in this order; all where it is not set.
pub const DEVICES_VARIABLE: &str = "TINYROCE_DEVICES";

/// Bytes around the payload of a packet at most: IPv6, UDP, BTH, AtomicETH, ICRC.
const OVERHEAD: u32 = 40 + 8 + 12 + 28 + 4;

/// State of a port, with the numbers of `ibv_port_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum PortState {
    /// The interface is down.
    Down = 1,
    /// The interface is up.
    Active = 4,
}

/// An RDMA device: an interface of this host. While it is open, it and its clones follow the interface's addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    name: String,
    interface: String,
    /// Number of the interface.
    pub(crate) index: u32,
    pub(crate) gids: GidTable,
    mac: [u8; 6],
}

/// Attributes of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortInfo {
    /// State of the port: active while the interface is up.
    pub state: PortState,
    /// The largest payload of a packet that the interface's packets hold, in bytes.
    pub active_mtu: u32,
    /// Entries of the table of addresses, also empty ones.
    pub gids: usize,
}

/// Returns true for an address that is valid on one interface alone.
pub(crate) fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

impl Device {
    /// The RDMA devices of this host: interfaces that are up and have an address. Those with a link-local address alone
    /// come behind the others, and the loopback interface comes last. `TINYROCE_DEVICES` picks and orders them.
    ///
    /// # Errors
    /// `ENODEV` where `TINYROCE_DEVICES` names an interface that is not there, or the system's error where it does not
    /// list its interfaces.
    pub fn list() -> Result<Vec<Device>> {
        let all = if_addrs::get_if_addrs().map_err(|e| Error::system("listing interfaces", &e))?;
        let mut interfaces: Vec<(String, u32, Vec<IpAddr>)> = Vec::new();
        for interface in all {
            let ip = interface.ip();
            match interfaces.iter_mut().find(|(name, ..)| *name == interface.name) {
                Some((.., addresses)) => addresses.push(ip),
                None => interfaces.push((interface.name, interface.index.unwrap_or(0), vec![ip])),
            }
        }
        let mut found: Vec<Device> = interfaces
            .into_iter()
            .map(|(interface, index, mut addresses)| {
                // Link-local ones last: what can be reached from everywhere has the first indexes.
                addresses.sort_by_key(|ip| (is_link_local(ip), ip.is_ipv6()));
                let (mac, gids) = (interface::mac(&interface), GidTable::new(addresses));
                Device { name: String::new(), interface, index, gids, mac }
            })
            .collect();
        found.retain(|d| d.state() == PortState::Active);
        found.sort_by_key(|d| (d.is_loopback(), d.addresses().iter().flatten().all(is_link_local), d.index));
        if let Ok(wanted) = std::env::var(DEVICES_VARIABLE) {
            let pick = |name: &str| {
                found.iter().find(|d| d.interface == name).cloned().ok_or_else(|| {
                    let names: Vec<_> = found.iter().map(|d| d.interface.as_str()).collect();
                    Error::new(
                        libc::ENODEV,
                        format!(
                            "{DEVICES_VARIABLE}: no interface {name:?} that is up with an address; there are {names:?}"
                        ),
                    )
                })
            };
            found = wanted.split(',').map(str::trim).filter(|n| !n.is_empty()).map(pick).collect::<Result<_>>()?;
        }
        for (i, device) in found.iter_mut().enumerate() {
            device.name = format!("tinyroce{i}");
        }
        Ok(found)
    }

    /// `tinyroce` and a number.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the interface.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Number of the interface.
    #[must_use]
    pub fn interface_index(&self) -> u32 {
        self.index
    }

    /// The device's GUID: from the MAC address as EUI-64, in network byte order.
    #[must_use]
    pub fn guid(&self) -> [u8; 8] {
        let [a, b, c, d, e, f] = self.mac;
        let index = if self.mac == [0; 6] { self.index as u8 } else { f };
        [a ^ 2, b, c, 0xff, 0xfe, d, e, index]
    }

    /// Addresses of its port, in the order of their indexes; all are RoCE version 2. Zeros stand for an address that
    /// went: the others keep their indexes. [`crate::EventKind::GidChange`] announces a change while the RDMA device is
    /// open, which is here before that.
    #[must_use]
    pub fn gids(&self) -> Vec<Gid> {
        self.addresses().into_iter().map(|ip| ip.map_or(Gid::default(), Gid::from)).collect()
    }

    pub(crate) fn addresses(&self) -> Vec<Option<IpAddr>> {
        self.gids.entries()
    }

    /// Index of the address that most peers can be reached from: IPv4, if there is one.
    #[must_use]
    pub fn default_gid_index(&self) -> u8 {
        self.addresses().iter().position(|ip| ip.is_some_and(|ip| ip.is_ipv4())).unwrap_or(0) as u8
    }

    /// Returns true for the loopback interface: peers are on this host.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.addresses().iter().flatten().any(IpAddr::is_loopback)
    }

    /// Queries the port's state from the system.
    #[must_use]
    pub fn port(&self) -> PortInfo {
        let mtu = interface::mtu(&self.interface).unwrap_or(1500);
        let fits = |payload: &u32| payload + OVERHEAD <= mtu;
        let active_mtu = [4096, 2048, 1024, 512].into_iter().find(fits).unwrap_or(256);
        PortInfo { state: self.state(), active_mtu, gids: self.addresses().len() }
    }

    fn state(&self) -> PortState {
        if interface::up(&self.interface) { PortState::Active } else { PortState::Down }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_a_card() {
        let devices = Device::list().expect("interfaces");
        let last = devices.last().expect("at least one");
        assert!(last.is_loopback() && last.name().starts_with("tinyroce"));
        assert_eq!(last.port().state, PortState::Active);
        assert_eq!(last.gids().get(usize::from(last.default_gid_index())).map(Gid::ip), Some([127, 0, 0, 1].into()));
    }
}
