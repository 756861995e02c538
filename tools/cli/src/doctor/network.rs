//! Network interfaces: state and addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::text;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Interface {
    pub(crate) name: String,
    /// As the kernel calls it: up, down, unknown (loopback, which is up).
    pub(crate) state: String,
    pub(crate) loopback: bool,
    pub(crate) mtu: Option<u32>,
    /// Mbit/s, where the driver knows.
    pub(crate) speed: Option<u32>,
    /// With the length of the subnet's prefix: `10.0.0.7/24`.
    pub(crate) addresses: Vec<String>,
}

impl Interface {
    /// Carries TCP.
    pub(crate) fn is_usable(&self) -> bool {
        !self.addresses.is_empty() && matches!(self.state.as_str(), "up" | "unknown")
    }
}

/// All interfaces, by name, those without an address too.
pub(crate) fn read(sys: &Path) -> Result<Vec<Interface>> {
    let found = if_addrs::get_if_addrs().context("listing the network interfaces")?;
    let addresses = found.iter().map(|i| {
        let prefix = match &i.addr {
            if_addrs::IfAddr::V4(a) => a.prefixlen,
            if_addrs::IfAddr::V6(a) => a.prefixlen,
        };
        (i.name.clone(), i.ip(), prefix)
    });
    Ok(merge(sys, addresses))
}

fn merge(sys: &Path, addresses: impl Iterator<Item = (String, IpAddr, u8)>) -> Vec<Interface> {
    let mut by_name: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in std::fs::read_dir(sys.join("class/net")).into_iter().flatten().flatten() {
        // A folder of links to devices; a file is something else, like bonding_masters.
        if entry.path().is_dir() {
            by_name.entry(entry.file_name().to_string_lossy().into_owned()).or_default();
        }
    }
    for (name, ip, prefix) in addresses {
        by_name.entry(name).or_default().push(format!("{ip}/{prefix}"));
    }
    let one = |(name, addresses): (String, Vec<String>)| {
        let file = |file: &str| text(sys.join("class/net").join(&name).join(file));
        Interface {
            state: file("operstate").unwrap_or_else(|| "unknown".to_owned()),
            // ARPHRD_LOOPBACK
            loopback: file("type").as_deref() == Some("772"),
            mtu: file("mtu").and_then(|t| t.parse().ok()),
            // -1 where it is not known.
            speed: file("speed").and_then(|t| t.parse().ok()),
            addresses,
            name,
        }
    };
    by_name.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_with_and_without_an_address() {
        let folder = tempfile::tempdir().unwrap();
        let net = folder.path().join("class/net");
        for (name, kind, state, speed) in
            [("lo", "772", "unknown", ""), ("eth0", "1", "up", "25000"), ("eth1", "1", "down", "-1")]
        {
            std::fs::create_dir_all(net.join(name)).unwrap();
            for (file, contents) in [("type", kind), ("operstate", state), ("speed", speed), ("mtu", "1500")] {
                std::fs::write(net.join(name).join(file), format!("{contents}\n")).unwrap();
            }
        }
        std::fs::write(net.join("bonding_masters"), "").unwrap();
        let addresses = [("lo", "127.0.0.1", 8), ("eth0", "10.0.0.7", 24), ("eth0", "fe80::1", 64)]
            .map(|(name, ip, prefix)| (name.to_owned(), ip.parse().unwrap(), prefix));
        let found = merge(folder.path(), addresses.into_iter());
        let names: Vec<&str> = found.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(names, ["eth0", "eth1", "lo"]);
        assert_eq!(found[0].addresses, ["10.0.0.7/24", "fe80::1/64"]);
        assert_eq!((found[0].speed, found[1].speed, found[2].speed), (Some(25_000), None, None));
        let usable: Vec<bool> = found.iter().map(Interface::is_usable).collect();
        assert_eq!((usable, found[2].loopback, found[0].loopback), (vec![true, false, true], true, false));
    }

    #[test]
    fn this_machine_has_a_loopback() {
        let found = read(Path::new("/sys")).unwrap();
        assert!(found.iter().any(|i| i.addresses.iter().any(|a| a.starts_with("127."))), "{found:?}");
    }
}
