//! Which addresses a rank advertises, and in which order a peer tries them.

use std::net::{IpAddr, SocketAddr};

use crate::error::{Error, Result};

/// An address of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Local {
    /// Interface, for messages.
    pub(crate) name: String,
    pub(crate) ip: IpAddr,
    /// Leading bits of `ip` that its subnet shares.
    prefix: u8,
}

/// Every usable address: interfaces that are up and pass the filter, and loopback.
///
/// `filter` is that of `Config::interface`: names or prefixes of names, comma-separated; a leading `^` excludes them.
///
/// # Errors
/// [`Error::Config`] when a filter was given and no interface passes it.
pub(crate) fn local(filter: Option<&str>) -> Result<Vec<Local>> {
    let all = if_addrs::get_if_addrs().unwrap_or_else(|e| {
        log::warn!("cannot list network interfaces ({e}): advertising loopback only");
        Vec::new()
    });
    let names: Vec<String> = all.iter().map(|i| i.name.clone()).collect();
    let mut found: Vec<Local> = all
        .into_iter()
        .filter(|i| i.is_loopback() || (i.is_oper_up() && filter.is_none_or(|f| passes(f, &i.name))))
        .map(|i| {
            let prefix = match &i.addr {
                if_addrs::IfAddr::V4(a) => a.prefixlen,
                if_addrs::IfAddr::V6(a) => a.prefixlen,
            };
            Local { ip: i.ip(), name: i.name, prefix }
        })
        // A link-local address means nothing without the number of the interface, which differs from host to host.
        .filter(|l| !matches!(l.ip, IpAddr::V6(ip) if ip.is_unicast_link_local()))
        .collect();
    if let Some(filter) = filter
        && found.iter().all(|l| l.ip.is_loopback())
    {
        return Err(Error::Config {
            name: "TINYNCCL_IFNAME".to_owned(),
            value: filter.to_owned(),
            detail: format!("expected the name of an interface that is up and has an address, got none of {names:?}"),
        });
    }
    if !found.iter().any(|l| l.ip.is_loopback()) {
        found.push(Local { name: "lo".to_owned(), ip: IpAddr::from([127, 0, 0, 1]), prefix: 8 });
    }
    Ok(found)
}

fn passes(filter: &str, name: &str) -> bool {
    let (exclude, list) = match filter.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, filter),
    };
    let listed = list.split(',').map(str::trim).any(|prefix| !prefix.is_empty() && name.starts_with(prefix));
    listed != exclude
}

/// The peer's addresses in the order to try them, each with the reason for its place.
pub(crate) fn candidates(peer: &[SocketAddr], same_network: bool, ours: &[Local]) -> Vec<(SocketAddr, &'static str)> {
    let mut ordered: Vec<(u8, SocketAddr, &'static str)> = peer
        .iter()
        .filter_map(|&addr| match addr.ip().is_loopback() {
            true if same_network => Some((0, addr, "loopback, same host")),
            true => None,
            false if ours.iter().any(|l| !l.ip.is_loopback() && shares_subnet(l, addr.ip())) => {
                Some((1, addr, "same subnet"))
            }
            false => Some((2, addr, "by route")),
        })
        .collect();
    ordered.sort_by_key(|(class, addr, _)| (*class, addr.is_ipv6()));
    ordered.into_iter().map(|(_, addr, why)| (addr, why)).collect()
}

fn shares_subnet(local: &Local, ip: IpAddr) -> bool {
    let same = |a: u128, b: u128, bits: u32| {
        let prefix = u32::from(local.prefix).min(bits);
        prefix == 0 || (a ^ b).checked_shr(bits - prefix).unwrap_or(0) == 0
    };
    match (local.ip, ip) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(u128::from(u32::from(a)), u128::from(u32::from(b)), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(u128::from(a), u128::from(b), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_take_prefixes_and_exclusions() {
        assert!(passes("eth", "eth0") && passes("ib,eth0", "eth0") && !passes("eth1", "eth0") && !passes("", "eth0"));
        assert!(!passes("^docker,veth", "veth12") && passes("^docker", "eth0"));
    }

    #[test]
    fn nearest_addresses_come_first_and_foreign_loopback_never() {
        let ours = [
            Local { name: "lo".into(), ip: [127, 0, 0, 1].into(), prefix: 8 },
            Local { name: "eth0".into(), ip: [10, 1, 2, 3].into(), prefix: 16 },
        ];
        let peer: Vec<SocketAddr> = ["192.168.1.1:1", "[fd00::1]:2", "10.1.9.9:3", "127.0.0.1:4", "10.2.0.1:5"]
            .map(|a| a.parse().unwrap())
            .into();
        let order = |same| candidates(&peer, same, &ours).iter().map(|(a, _)| a.port()).collect::<Vec<_>>();
        assert_eq!(order(true), [4, 3, 1, 5, 2]);
        assert_eq!(order(false), [3, 1, 5, 2]);
    }

    #[test]
    fn loopback_is_always_there_and_an_unknown_interface_is_an_error() {
        assert!(local(None).unwrap().iter().any(|l| l.ip.is_loopback()));
        let e = local(Some("nosuch")).unwrap_err().to_string();
        assert!(e.contains("TINYNCCL_IFNAME") && e.contains("nosuch"), "{e}");
    }
}
