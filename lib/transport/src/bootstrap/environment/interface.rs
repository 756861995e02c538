//! Local addresses to advertise, and the order in which a peer's addresses are tried.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;

/// Bridges that exist with the same addresses on every host that has them, so that a peer would reach itself.
const BRIDGES: [&str; 2] = ["docker", "virbr"];

/// Returns true if an interface is a bridge of a container or virtual-machine manager, by its name.
pub(crate) fn is_bridge(interface: &str) -> bool {
    BRIDGES.iter().any(|bridge| interface.starts_with(bridge))
}

/// An address of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// Name of the interface.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Bits of the subnet.
    pub prefix: u8,
    /// Reaches this host only.
    pub loopback: bool,
}

/// The addresses of the interfaces that are up and that `config.interface` allows, most useful first: IPv4, IPv6,
/// loopback.
///
/// IPv6 link-local addresses mean nothing without an interface at the other end and are left out; so are the bridges of
/// container and virtual-machine managers, unless named.
pub fn local_addresses(config: &Config) -> Result<Vec<LocalAddress>> {
    select(all(if_addrs::Interface::is_oper_up)?, config.interface.as_deref())
}

/// The addresses of the interfaces for which `wanted`.
pub(crate) fn all(wanted: impl Fn(&if_addrs::Interface) -> bool) -> Result<Vec<LocalAddress>> {
    let found = if_addrs::get_if_addrs().map_err(|e| Error::io("interfaces", "listing them", &e))?;
    let address = |i: if_addrs::Interface| LocalAddress {
        ip: i.ip(),
        loopback: i.is_loopback(),
        prefix: match &i.addr {
            if_addrs::IfAddr::V4(a) => a.prefixlen,
            if_addrs::IfAddr::V6(a) => a.prefixlen,
        },
        interface: i.name,
    };
    Ok(found.into_iter().filter(wanted).map(address).collect())
}

/// The addresses of the interfaces that are up now; `None` where they cannot be listed.
pub(crate) fn up() -> Option<Vec<IpAddr>> {
    let all = all(if_addrs::Interface::is_oper_up).ok()?;
    Some(all.into_iter().map(|address| address.ip).collect())
}

/// [`local_addresses`], and loopback even if the setting leaves it out: ranks of one host always have it in common.
pub fn with_loopback(config: &Config) -> Result<Vec<LocalAddress>> {
    let mut all = local_addresses(config)?;
    if !all.iter().any(|a| a.loopback) {
        all.push(LocalAddress {
            interface: "lo".to_owned(),
            ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
            prefix: 8,
            loopback: true,
        });
    }
    Ok(all)
}

/// Filters and orders. Of several names one is enough, as with NCCL's `NCCL_SOCKET_IFNAME`: a list may be that of all
/// hosts.
pub(in crate::bootstrap) fn select(mut all: Vec<LocalAddress>, filter: Option<&str>) -> Result<Vec<LocalAddress>> {
    all.sort_by_key(|a| (a.loopback, a.ip.is_ipv6()));
    let Some(names) = NameFilter::parse(filter) else {
        all.retain(|a| is_usable(a.ip) && !is_bridge(&a.interface));
        return Ok(all);
    };
    let by_name = |a: &&LocalAddress| is_usable(a.ip) && names.lets_through(&a.interface);
    let chosen: Vec<LocalAddress> = all.iter().filter(by_name).cloned().collect();
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let up: Vec<String> = all.iter().map(|a| format!("{} ({})", a.interface, a.ip)).collect();
    let only_link_local = all.iter().find(|a| names.lets_through(&a.interface));
    let what = match (only_link_local, names.excluded) {
        (Some(a), _) => format!(
            "{} has no other address than link-local ones, which need an interface at the other end",
            a.interface
        ),
        (None, true) => "it leaves no interface".to_owned(),
        (None, false) => {
            let how = if names.exact { "is" } else { "begins with" };
            format!("no interface's name {how} {}", names.quoted())
        }
    };
    let detail = format!("{what}; interfaces that are up: {}", up.join(", "));
    Err(Error::config("TINYNCCL_IFNAME", names.text, detail))
}

/// Returns true if the address can be announced to another host.
fn is_usable(ip: IpAddr) -> bool {
    !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()) && !ip.is_unspecified()
}

/// A setting that chooses interfaces or devices: the beginnings of their names, or after `=` whole names; with `^` in
/// front those to leave out.
pub(crate) struct NameFilter<'a> {
    pub(crate) text: &'a str,
    names: Vec<&'a str>,
    excluded: bool,
    exact: bool,
}

impl<'a> NameFilter<'a> {
    /// `None` when it chooses nothing.
    pub(crate) fn parse(text: Option<&'a str>) -> Option<NameFilter<'a>> {
        let text = text.map(str::trim).filter(|text| !text.is_empty())?;
        let (rest, excluded) = text.strip_prefix('^').map_or((text, false), |rest| (rest, true));
        let (rest, exact) = rest.strip_prefix('=').map_or((rest, false), |rest| (rest, true));
        let names = rest.split(',').map(str::trim).filter(|n| !n.is_empty()).collect();
        Some(NameFilter { text, names, excluded, exact })
    }

    /// Returns its names as a text for people.
    fn quoted(&self) -> String {
        let names: Vec<String> = self.names.iter().map(|name| format!("{name:?}")).collect();
        if names.is_empty() { "anything: the list is empty".to_owned() } else { names.join(" or ") }
    }

    fn fits(&self, one: &str, name: &str) -> bool {
        if self.exact { name == one } else { name.starts_with(one) }
    }

    pub(crate) fn lets_through(&self, name: &str) -> bool {
        self.names.iter().any(|one| self.fits(one, name)) != self.excluded
    }
}

/// A peer's addresses in the order in which they should be tried, each with the reason for its rank (also logged).
///
/// First the addresses in a subnet of ours, then those to which the kernel has a route. Loopback only when the peer is
/// (or may be) on the same host; an address that we have ourselves only there, too, because elsewhere it is a bridge's.
pub fn order_candidates(local: &[LocalAddress], peer: &[SocketAddr], same_host: bool) -> Vec<(SocketAddr, String)> {
    let mut ranked: Vec<(u8, SocketAddr, String)> = peer
        .iter()
        .filter_map(|&address| {
            let (place, reason) = judge(local, address, same_host)?;
            Some((place, address, reason))
        })
        .collect();
    ranked.sort_by_key(|(place, ..)| *place);
    for (n, (_, address, reason)) in ranked.iter().enumerate() {
        log::debug!("candidate {} of {}: {address}: {reason}", n + 1, ranked.len());
    }
    ranked.into_iter().map(|(_, address, reason)| (address, reason)).collect()
}

/// Returns true if one of a peer's addresses is in a subnet of ours, or the kernel has a route there from an address of
/// ours.
pub(crate) fn leads_to(local: &[LocalAddress], peer: &[SocketAddr], same_host: bool) -> bool {
    peer.iter().filter_map(|&address| judge(local, address, same_host)).any(|(place, _)| place < NOT_CHOSEN)
}

/// Rank of an address to which the kernel has a route, but not from an interface that was chosen.
const NOT_CHOSEN: u8 = 3;

fn judge(local: &[LocalAddress], address: SocketAddr, same_host: bool) -> Option<(u8, String)> {
    let ip = address.ip();
    if let Some(own) = local.iter().find(|a| a.ip == ip && !a.loopback) {
        return same_host.then(|| (0, format!("this host's own address on {}", own.interface)));
    }
    if ip.is_loopback() {
        return same_host.then(|| (2, "loopback of this host".to_owned()));
    }
    if let Some(near) = local.iter().find(|a| !a.loopback && same_subnet(a, ip)) {
        return Some((0, format!("same subnet as {} of {} (/{})", near.ip, near.interface, near.prefix)));
    }
    match source_for(address) {
        Ok(source) => Some(match local.iter().find(|a| a.ip == source) {
            Some(a) => (1, format!("route through {} from {source}", a.interface)),
            None => (NOT_CHOSEN, format!("route from {source}, an interface that was not chosen")),
        }),
        Err(e) => Some((NOT_CHOSEN + 1, format!("no route: {e}"))),
    }
}

fn same_subnet(local: &LocalAddress, ip: IpAddr) -> bool {
    in_subnet(local.ip, local.prefix, ip)
}

/// Returns true if `ip` is in the subnet of `own`, of `prefix` bits.
pub fn in_subnet(own: IpAddr, prefix: u8, ip: IpAddr) -> bool {
    match (own, ip) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
            prefix > 0 && (a.to_bits() ^ b.to_bits()) & mask == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0);
            prefix > 0 && (a.to_bits() ^ b.to_bits()) & mask == 0
        }
        _ => false,
    }
}

/// The first address of the subnet of `own`, with its length: `10.0.1.0/24`.
pub fn subnet(own: IpAddr, prefix: u8) -> String {
    let first: IpAddr = match own {
        IpAddr::V4(ip) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
            Ipv4Addr::from_bits(ip.to_bits() & mask).into()
        }
        IpAddr::V6(ip) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0);
            Ipv6Addr::from_bits(ip.to_bits() & mask).into()
        }
    };
    format!("{first}/{prefix}")
}

/// Pairs of one of `ours` and one of `theirs` ports that reach each other, each port in one pair at most. Both ends
/// compute the same pairs if they agree on whose are ours: those of the same index in both lists first, so that several
/// connections spread over several ports.
pub(crate) fn pair_up(ours: usize, theirs: usize, reach: impl Fn(usize, usize) -> bool) -> Vec<(usize, usize)> {
    let mut pairs: Vec<(usize, usize)> =
        (0..ours).flat_map(|o| (0..theirs).map(move |t| (o, t))).filter(|&(o, t)| reach(o, t)).collect();
    pairs.sort_by_key(|&(o, t)| (o.abs_diff(t), o, t));
    let mut best: Vec<(usize, usize)> = Vec::new();
    for &(o, t) in &pairs {
        if !best.iter().any(|&(bo, bt)| bo == o || bt == t) {
            best.push((o, t));
        }
    }
    best
}

/// The address from which the kernel would talk to `peer`.
pub(crate) fn source_for(peer: SocketAddr) -> std::io::Result<IpAddr> {
    let any = if peer.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    Ok(route(any, peer)?.local_addr()?.ip())
}

/// A socket for the kernel's route to `peer` from one of our addresses: connecting a UDP socket looks the route up and
/// sends nothing.
pub(crate) fn route(from: IpAddr, peer: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind((from, 0))?;
    socket.connect(peer)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(interface: &str, ip: &str, prefix: u8) -> LocalAddress {
        let ip: IpAddr = ip.parse().unwrap();
        LocalAddress { interface: interface.into(), ip, prefix, loopback: ip.is_loopback() }
    }

    fn host() -> Vec<LocalAddress> {
        vec![
            address("lo", "127.0.0.1", 8),
            address("lo", "::1", 128),
            address("eth0", "fe80::1", 64),
            address("eth0", "fd00::5", 64),
            address("eth0", "10.1.2.3", 24),
            address("ib0", "192.168.7.3", 16),
            address("docker0", "172.17.0.1", 16),
        ]
    }

    fn names(filter: Option<&str>) -> Vec<String> {
        select(host(), filter).unwrap().iter().map(|a| format!("{} {}", a.interface, a.ip)).collect()
    }

    #[test]
    fn a_way_begins_at_an_address_of_ours() {
        let ours = [address("r0", "10.77.1.1", 30)];
        let to = |text: &str| leads_to(&ours, &[text.parse().unwrap()], false);
        assert!(to("10.77.1.2:1"));
        // Not one that another interface of this machine may know.
        assert!(!to("10.77.2.2:1"));
        // Where another host has our address it is a bridge's.
        assert!(!to("10.77.1.1:1") && leads_to(&ours, &["10.77.1.1:1".parse().unwrap()], true));
        assert!(!leads_to(&ours, &[], true));
    }

    #[test]
    fn subnets_have_a_name() {
        let name = |ip: &str, prefix| subnet(ip.parse().unwrap(), prefix);
        assert_eq!(name("10.0.1.17", 24), "10.0.1.0/24");
        assert_eq!((name("10.0.1.17", 0), name("10.0.1.17", 32)), ("0.0.0.0/0".into(), "10.0.1.17/32".into()));
        assert_eq!(name("fd00::1:17", 64), "fd00::/64");
    }

    #[test]
    fn ipv4_first_loopback_last_no_link_local_no_bridge() {
        assert_eq!(names(None), ["eth0 10.1.2.3", "ib0 192.168.7.3", "eth0 fd00::5", "lo 127.0.0.1", "lo ::1"]);
    }

    #[test]
    fn names_prefixes_and_exclusion() {
        assert_eq!(names(Some("ib")), ["ib0 192.168.7.3"]);
        assert_eq!(names(Some("docker0, lo")), ["docker0 172.17.0.1", "lo 127.0.0.1", "lo ::1"]);
        assert_eq!(names(Some("^lo,docker,eth")), ["ib0 192.168.7.3"]);
        assert_eq!(names(Some("^nothing")).len(), 6);
        assert_eq!(names(Some("=eth0,lo")), ["eth0 10.1.2.3", "eth0 fd00::5", "lo 127.0.0.1", "lo ::1"]);
        assert_eq!(names(Some("^=eth0,lo,docker")), ["ib0 192.168.7.3", "docker0 172.17.0.1"]);
        let e = select(host(), Some("=eth")).unwrap_err().to_string();
        assert!(e.contains("no interface's name is \"eth\""), "{e}");
    }

    #[test]
    fn an_unknown_name_lists_what_there_is() {
        let e = select(host(), Some("ens,eno1")).unwrap_err().to_string();
        for word in ["TINYNCCL_IFNAME", "\"ens\" or \"eno1\"", "ib0 (192.168.7.3)", "eth0 (fe80::1)"] {
            assert!(e.contains(word), "no {word}: {e}");
        }
        let e = select(host(), Some("^e,i,d,l")).unwrap_err().to_string();
        assert!(e.contains("leaves no interface"), "{e}");
    }

    #[test]
    fn one_name_of_a_list_is_enough() {
        assert_eq!(names(Some("bond0,ib,ens")), ["ib0 192.168.7.3"]);
        assert_eq!(names(Some("=ib,ib0")), ["ib0 192.168.7.3"]);
        assert_eq!(names(Some("ib0,,")), ["ib0 192.168.7.3"]);
        for none in [",", "=", "ib00", "=ib", "IB0"] {
            assert!(select(host(), Some(none)).is_err(), "{none}");
        }
    }

    #[test]
    fn link_local_addresses_are_used_where_a_peer_can_reach_them() {
        let all =
            || vec![address("p0", "169.254.3.4", 16), address("p1", "fe80::2", 64), address("lo", "127.0.0.1", 8)];
        let names = |filter| select(all(), filter).map(|all| all.into_iter().map(|a| a.interface).collect::<Vec<_>>());
        assert_eq!(names(None).unwrap(), ["p0", "lo"]);
        assert_eq!(names(Some("p0")).unwrap(), ["p0"]);
        assert_eq!(names(Some("^p1")).unwrap(), ["p0", "lo"]);
        let e = names(Some("p1")).unwrap_err().to_string();
        assert!(e.contains("p1 has no other address than link-local") && e.contains("p1 (fe80::2)"), "{e}");
    }

    #[test]
    fn candidates_are_ordered_with_reasons() {
        let local = select(host(), None).unwrap();
        let peer: Vec<SocketAddr> = ["127.0.0.1:1", "192.168.200.9:1", "[fd00::9]:1", "10.1.2.3:1"]
            .iter()
            .map(|a| a.parse().unwrap())
            .collect();
        let here = order_candidates(&local, &peer, true);
        assert_eq!(here.len(), 4);
        assert_eq!(here[3].0, peer[0], "loopback last: {here:?}");
        assert!(here[0].1.contains("same subnet as 192.168.7.3 of ib0 (/16)"), "{here:?}");
        let elsewhere = order_candidates(&local, &peer, false);
        let ips: Vec<String> = elsewhere.iter().map(|(a, _)| a.ip().to_string()).collect();
        assert_eq!(ips, ["192.168.200.9", "fd00::9"], "no loopback and no clash with our own address");
    }

    #[test]
    fn this_host_has_a_loopback() {
        let all = local_addresses(&Config::default()).unwrap();
        assert!(all.iter().any(|a| a.loopback), "{all:?}");
        assert_eq!(source_for("127.0.0.1:9".parse().unwrap()).unwrap().to_string(), "127.0.0.1");
    }
}
