//! Settings of verbs links, and which ports of which devices they may use.

use super::address::VerbsAddress;
use super::sys::{self, Context, Gid, GidEntry, GidType, Timing};
use crate::bootstrap::interface::{self, LocalAddress, NameFilter};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;

/// A port to be used.
#[derive(Debug)]
pub(crate) struct LocalPort {
    pub(crate) address: VerbsAddress,
    /// Index of the GID in the port's table.
    pub(crate) gid_index: u8,
    /// `ibv_mtu` code of the port.
    pub(crate) mtu: u32,
    /// Other hosts have the same address: of loopback, or of a bridge for containers.
    pub(super) everywhere: bool,
}

pub(super) fn timing(config: &Config) -> Timing {
    // Credits rule out that a receive is missing, so waiting for one longer than for a lost packet makes no sense.
    Timing { timeout: config.verbs_timeout as u8, retries: config.verbs_retries as u8, rnr_retries: 6 }
}

/// Names of the devices that `config.verbs_device` lets through.
pub(super) fn devices(config: &Config) -> Result<Vec<String>> {
    let all = sys::device_names()?;
    if all.is_empty() {
        return Err(none(NO_DEVICE));
    }
    select_devices(all, config.verbs_device.as_deref())
}

#[cfg(feature = "verbs")]
const NO_DEVICE: &str = "this machine has no RDMA device that its libibverbs knows. Build without `--features verbs` to \
    use the card in user space, load the driver of your adapter, or make a software device: \
    modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0 (in a virtual machine: scripts/rxe-vm.sh)";
#[cfg(not(feature = "verbs"))]
const NO_DEVICE: &str = "the card in user space has no interface: expected a network interface that is up with an address, \
    and TINYROCE_DEVICES not to exclude it";

pub(super) fn none(detail: impl Into<String>) -> Error {
    Error::Unsupported {
        what: "RDMA (TINYNCCL_TRANSPORT=verbs)".to_owned(),
        detail: format!("{}; or set TINYNCCL_TRANSPORT=auto", detail.into()),
    }
}

fn select_devices(all: Vec<String>, filter: Option<&str>) -> Result<Vec<String>> {
    let Some(names) = NameFilter::parse(filter) else { return Ok(all) };
    let exists = all.join(", ");
    let kept: Vec<String> = all.into_iter().filter(|device| names.lets_through(device)).collect();
    if kept.is_empty() {
        let detail = format!("no RDMA device is left; this machine has {exists}");
        return Err(Error::config("TINYNCCL_VERBS_DEVICE", names.text, detail));
    }
    Ok(kept)
}

/// The ports of an opened device that `config` lets through and that have an address which others can reach.
pub(super) fn ports(context: &Context, config: &Config) -> Result<Vec<LocalPort>> {
    let count = context.ports()?;
    let wanted = u8::try_from(config.verbs_port).unwrap_or(u8::MAX);
    if wanted > count {
        let detail = format!("the RDMA device {} has ports 1 to {count}; 0 stands for all of them", context.name());
        return Err(Error::config("TINYNCCL_VERBS_PORT", wanted, detail));
    }
    let gids = context.gids()?;
    let locals = interface::all(|_| true)?;
    let mut usable = Vec::new();
    for port in (1..=count).filter(|p| wanted == 0 || wanted == *p) {
        let state = context.port(port)?;
        if !state.active {
            let name = context.name();
            if wanted != 0 {
                let detail =
                    format!("port {port} of the RDMA device {name} is not active (is its network interface up?)");
                return Err(Error::config("TINYNCCL_VERBS_PORT", port, detail));
            }
            log::debug!("RDMA device {name}: port {port} is not active");
            continue;
        }
        let table: Vec<&GidEntry> = gids.iter().filter(|g| g.port == u32::from(port)).collect();
        for entry in pick(&table, state.infiniband, config.verbs_gid_index.as_deref(), context.name(), port)? {
            let address = VerbsAddress {
                device: context.name().to_owned(),
                port,
                gid: entry.gid.0,
                prefix: if state.infiniband { 64 } else { prefix(&entry.gid, &locals) },
                infiniband: state.infiniband,
                lid: state.lid,
            };
            let everywhere =
                locals.iter().any(|l| l.ip == entry.gid.ip() && (l.loopback || interface::is_bridge(&l.interface)));
            usable.push(LocalPort { address, gid_index: entry.index as u8, mtu: state.mtu, everywhere });
        }
    }
    Ok(usable)
}

/// The entries of a port's table to use: the one that was asked for; or every RoCE v2 one of an IPv4 address, or of a
/// global IPv6 address where there is none; or the first one over InfiniBand.
fn pick<'a>(
    table: &[&'a GidEntry],
    infiniband: bool,
    asked: Option<&str>,
    device: &str,
    port: u8,
) -> Result<Vec<&'a GidEntry>> {
    let describe = || {
        let rows: Vec<String> = table.iter().map(|g| format!("{}: {} {:?}", g.index, g.gid.ip(), g.kind)).collect();
        if rows.is_empty() { "the table is empty".to_owned() } else { format!("the table has {}", rows.join(", ")) }
    };
    if let Some(asked) = asked.map(str::trim).filter(|a| !a.is_empty()) {
        let wrong = |detail: &str| {
            let detail = format!("{detail}; RDMA device {device}, port {port}: {}", describe());
            Error::config("TINYNCCL_VERBS_GID_INDEX", asked, detail)
        };
        let index: u8 = asked.parse().map_err(|_| wrong("expected a number from 0 to 255, or nothing"))?;
        return match table.iter().find(|g| g.index == u32::from(index)) {
            None => Err(wrong("there is no such entry")),
            Some(entry) if entry.kind == GidType::RoceV1 => {
                Err(wrong("that entry is RoCE v1, which cannot be routed and which software devices do not speak"))
            }
            Some(entry) => Ok(vec![entry]),
        };
    }
    if infiniband {
        return Ok(table.first().copied().into_iter().collect());
    }
    let roce = |v4: bool| -> Vec<&GidEntry> {
        let usable = |g: &Gid| match g.ip() {
            std::net::IpAddr::V4(ip) => v4 && !ip.is_link_local() && !ip.is_unspecified(),
            std::net::IpAddr::V6(ip) => !v4 && !ip.is_unicast_link_local() && !ip.is_unspecified(),
        };
        table.iter().copied().filter(|g| g.kind == GidType::RoceV2 && usable(&g.gid)).collect()
    };
    let (v4, v6) = (roce(true), roce(false));
    if v4.is_empty() && v6.is_empty() {
        log::debug!("RDMA device {device}, port {port}: no RoCE v2 address; {}", describe());
    }
    Ok(if v4.is_empty() { v6 } else { v4 })
}

/// Bits of the GID that make its subnet: those of the interface with the same address; a guess where there is none.
fn prefix(gid: &Gid, locals: &[LocalAddress]) -> u8 {
    let ip = gid.ip();
    let known = locals.iter().find(|local| local.ip == ip).map(|local| local.prefix);
    if ip.is_ipv4() { 96 + known.unwrap_or(24) } else { known.unwrap_or(64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, ip: &str, kind: GidType) -> GidEntry {
        let ip: std::net::IpAddr = ip.parse().unwrap();
        let bytes = match ip {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(ip) => ip.octets(),
        };
        GidEntry { gid: Gid(bytes), index, port: 1, kind }
    }

    #[test]
    fn the_routable_ipv4_entry_is_taken_unless_another_one_is_asked_for() {
        let table = [
            entry(0, "fe80::1", GidType::RoceV1),
            entry(1, "fe80::1", GidType::RoceV2),
            entry(2, "10.0.0.1", GidType::RoceV1),
            entry(3, "10.0.0.1", GidType::RoceV2),
            entry(4, "fd00::7", GidType::RoceV2),
        ];
        let table: Vec<&GidEntry> = table.iter().collect();
        let index = |asked: Option<&str>| -> Result<Vec<u32>> {
            Ok(pick(&table, false, asked, "rxe0", 1)?.iter().map(|g| g.index).collect())
        };
        assert_eq!(index(None).unwrap(), [3]);
        assert_eq!(index(Some("1")).unwrap(), [1]);
        for (asked, expected) in [("9", "no such entry"), ("2", "RoCE v1"), ("x", "expected a number")] {
            let e = index(Some(asked)).unwrap_err().to_string();
            assert!(e.contains(expected) && e.contains("3: 10.0.0.1 RoceV2") && e.contains("rxe0"), "{e}");
        }
        assert_eq!(pick(&table[..2], false, None, "rxe0", 1).unwrap().len(), 0);
        assert_eq!(pick(&table[4..], false, None, "rxe0", 1).unwrap().len(), 1);
        assert_eq!(pick(&table, true, None, "ib0", 1).unwrap().first().unwrap().index, 0);
    }

    #[test]
    fn device_filters_name_what_exists() {
        let all = || vec!["mlx5_0".to_owned(), "mlx5_1".to_owned(), "rxe0".to_owned()];
        assert_eq!(select_devices(all(), None).unwrap().len(), 3);
        assert_eq!(select_devices(all(), Some("rxe")).unwrap(), ["rxe0"]);
        assert_eq!(select_devices(all(), Some("^mlx5")).unwrap(), ["rxe0"]);
        assert_eq!(select_devices(all(), Some("mlx5_1,rxe0")).unwrap(), ["mlx5_1", "rxe0"]);
        let e = select_devices(all(), Some("efa")).unwrap_err().to_string();
        assert!(e.contains("TINYNCCL_VERBS_DEVICE") && e.contains("mlx5_0, mlx5_1, rxe0"), "{e}");
    }

    #[test]
    fn the_subnet_is_that_of_the_interface() {
        let local = |ip: &str, prefix| LocalAddress {
            interface: "eth0".to_owned(),
            ip: ip.parse().unwrap(),
            prefix,
            loopback: false,
        };
        let locals = [local("10.0.0.1", 20), local("fd00::7", 48)];
        assert_eq!(prefix(&entry(0, "10.0.0.1", GidType::RoceV2).gid, &locals), 116);
        assert_eq!(prefix(&entry(0, "10.0.0.2", GidType::RoceV2).gid, &locals), 120);
        assert_eq!(prefix(&entry(0, "fd00::7", GidType::RoceV2).gid, &locals), 48);
    }
}
