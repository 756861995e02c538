//! Devices: one card for each interface that is up and has an address.

use std::net::IpAddr;
use std::sync::Arc;

use crate::context::Context;
use crate::error::{Error, Result};
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

/// A card: an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    name: String,
    interface: String,
    /// Number of the interface.
    pub(crate) index: u32,
    gids: Vec<IpAddr>,
    mac: [u8; 6],
}

/// What a port says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortInfo {
    /// The interface is up, or not.
    pub state: PortState,
    /// The largest payload of a packet that the interface's packets hold, in bytes.
    pub active_mtu: u32,
    /// Addresses.
    pub gids: usize,
}

impl Device {
    /// The cards of this host: interfaces that are up and have an address, those of other hosts' networks before the
    /// loopback interface. `TINYROCE_DEVICES` picks and orders them.
    ///
    /// # Errors
    /// Where the system does not list its interfaces, or `TINYROCE_DEVICES` names one that is not there.
    pub fn list() -> Result<Vec<Device>> {
        let all = if_addrs::get_if_addrs().map_err(|e| Error::system("listing interfaces", &e))?;
        let mut found: Vec<Device> = Vec::new();
        for interface in all {
            let ip = interface.ip();
            match found.iter_mut().find(|d| d.interface == interface.name) {
                Some(device) => device.gids.push(ip),
                None => found.push(Device {
                    name: String::new(),
                    mac: mac(&interface.name),
                    index: interface.index.unwrap_or(0),
                    interface: interface.name,
                    gids: vec![ip],
                }),
            }
        }
        found.retain(|d| d.state() == PortState::Active);
        found.sort_by_key(|d| (d.is_loopback(), d.index));
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
            // Link-local addresses first, as the kernel's table begins with the one that every interface has.
            device.gids.sort_by_key(|ip| match ip {
                IpAddr::V6(ip) if ip.is_unicast_link_local() => 0,
                IpAddr::V4(_) => 1,
                IpAddr::V6(_) => 2,
            });
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

    /// Addresses of its port, in the order of their indexes; all are RoCE version 2.
    #[must_use]
    pub fn gids(&self) -> Vec<Gid> {
        self.gids.iter().copied().map(Gid::from).collect()
    }

    pub(crate) fn addresses(&self) -> &[IpAddr] {
        &self.gids
    }

    /// Index of the address that most peers can be reached from: IPv4, if there is one.
    #[must_use]
    pub fn default_gid_index(&self) -> u8 {
        self.gids.iter().position(IpAddr::is_ipv4).unwrap_or(0) as u8
    }

    /// The interface is the loopback interface: peers are on this host.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.gids.iter().any(IpAddr::is_loopback)
    }

    /// The port's state, asked for anew.
    #[must_use]
    pub fn port(&self) -> PortInfo {
        let mtu = read_number(&self.interface, "mtu").unwrap_or(1500) as u32;
        let fits = |payload: &u32| payload + OVERHEAD <= mtu;
        let active_mtu = [4096, 2048, 1024, 512].into_iter().find(fits).unwrap_or(256);
        PortInfo { state: self.state(), active_mtu, gids: self.gids.len() }
    }

    fn state(&self) -> PortState {
        let flags = read_number(&self.interface, "flags").unwrap_or(0);
        let up = (libc::IFF_UP | libc::IFF_RUNNING) as u64;
        // `flags` of sysfs has IFF_UP, and IFF_RUNNING not always: the operational state says the rest.
        let carrier = read_text(&self.interface, "operstate").is_none_or(|s| s == "up" || s == "unknown");
        if flags & up == up || (flags & libc::IFF_UP as u64 != 0 && carrier) {
            PortState::Active
        } else {
            PortState::Down
        }
    }

    /// Opens the card.
    ///
    /// # Errors
    /// `EADDRINUSE` where something else has UDP port 4791, `ENOSPC` where all cards of the host are taken, and what
    /// else the system refuses.
    pub fn open(&self) -> Result<Arc<Context>> {
        Context::open(self)
    }
}

fn read_text(interface: &str, file: &str) -> Option<String> {
    std::fs::read_to_string(format!("/sys/class/net/{interface}/{file}")).ok().map(|s| s.trim().to_owned())
}

fn read_number(interface: &str, file: &str) -> Option<u64> {
    let text = read_text(interface, file)?;
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

fn mac(interface: &str) -> [u8; 6] {
    let text = read_text(interface, "address").unwrap_or_default();
    let mut mac = [0; 6];
    for (byte, digits) in mac.iter_mut().zip(text.split(':')) {
        *byte = u8::from_str_radix(digits, 16).unwrap_or(0);
    }
    mac
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
