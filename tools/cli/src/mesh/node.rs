//! A node of the mesh: its name, and its ports with their subnets.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tinynccl::Config;
use tinynccl::bootstrap::Host;
use tinynccl::bootstrap::interface::{LocalAddress, local_addresses, subnet};

use crate::doctor::network;

/// A node, as it registers with the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) host: Host,
    pub(super) ports: Vec<Port>,
    /// Random token that a ping begins with; connections without it get no reply.
    pub(super) token: u64,
}

/// One address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Port {
    pub(super) interface: String,
    pub(super) ip: IpAddr,
    /// Bits of the subnet.
    pub(super) prefix: u8,
    /// Mbit/s, where the driver knows.
    pub(super) speed: Option<u32>,
    pub(super) mtu: Option<u32>,
    /// Address at which the node answers pings on this port; `None` without `--check`.
    pub(super) echo: Option<SocketAddr>,
}

impl Node {
    /// This node's ports: the addresses that `TINYNCCL_IFNAME` lets through, loopback left out.
    ///
    /// # Errors
    /// The interfaces cannot be listed, or the setting names one that does not exist.
    pub(super) fn here(config: &Config) -> Result<Node> {
        let interfaces: BTreeMap<String, network::Interface> =
            network::read(Path::new("/sys"))?.into_iter().map(|found| (found.name.clone(), found)).collect();
        let port = |LocalAddress { interface, ip, prefix, .. }| {
            let known = interfaces.get(&interface);
            let (speed, mtu) = known.map_or((None, None), |known| (known.speed, known.mtu));
            Port { interface, ip, prefix, speed, mtu, echo: None }
        };
        let wired = local_addresses(config)?.into_iter().filter(|address| !address.loopback);
        let mut token = [0; 8];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty()).context("a random number")?;
        Ok(Node { host: Host::current(), ports: wired.map(port).collect(), token: u64::from_le_bytes(token) })
    }
}

impl Port {
    /// The first address of the subnet, with its length: `10.0.1.0/24`.
    pub(super) fn subnet(&self) -> String {
        subnet(self.ip, self.prefix)
    }

    /// In words: `eth1 10.0.1.1/24, 1 Gbit/s, MTU 1500`.
    pub(super) fn describe(&self) -> String {
        let mtu = self.mtu.map_or_else(String::new, |mtu| format!(", MTU {mtu}"));
        format!("{} {}/{}, {}{mtu}", self.interface, self.ip, self.prefix, speed(self.speed))
    }
}

/// A speed in words.
pub(super) fn speed(mbit: Option<u32>) -> String {
    match mbit {
        None => "speed unknown".to_owned(),
        Some(mbit) if mbit >= 1000 => format!("{} Gbit/s", f64::from(mbit) / 1000.0),
        Some(mbit) => format!("{mbit} Mbit/s"),
    }
}
