//! Paths between two hosts: the pairs of addresses that reach each other.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::bootstrap::interface::{LocalAddress, in_subnet, order_candidates, pair_up, source_for};

/// An address of a peer and the bits of its subnet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) struct Remote {
    pub(in crate::rails) ip: IpAddr,
    pub(in crate::rails) prefix: u8,
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

/// A path from one of our addresses to one of theirs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::rails) struct Route {
    pub(in crate::rails) from: Option<IpAddr>,
    pub(in crate::rails) to: IpAddr,
    pub(in crate::rails) why: String,
    /// Acceptors of the relays between, the nearest first; `to` is then not a neighbour.
    pub(in crate::rails) relays: Vec<SocketAddr>,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.from {
            Some(from) => write!(f, "{from} -> {} ({})", self.to, self.why),
            None => write!(f, "{} ({})", self.to, self.why),
        }
    }
}

/// Returns addresses as text.
pub(in crate::rails) fn list(ports: &[LocalAddress]) -> String {
    let texts = |p: &LocalAddress| format!("{} {}/{}", p.interface, p.ip, p.prefix);
    ports.iter().map(texts).collect::<Vec<_>>().join(", ")
}

/// Returns a peer's addresses as text, as [`list`] does ours.
pub(in crate::rails) fn list_remote(ports: &[Remote]) -> String {
    match ports {
        [] => "none".to_owned(),
        some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// Returns the paths to a peer: within a host its nearest address; between hosts all pairs of ports in common subnets,
/// else one to which the kernel has a route from a port of ours. Empty where there is none.
pub(in crate::rails) fn routes(ours: &[LocalAddress], theirs: &[Remote], same_host: bool) -> Vec<Route> {
    let addresses: Vec<SocketAddr> = theirs.iter().map(|t| SocketAddr::new(t.ip, 0)).collect();
    let ordered = order_candidates(ours, &addresses, same_host);
    if same_host {
        let nearest = ordered.into_iter().next();
        return nearest
            .map(|(to, why)| Route { from: None, to: to.ip(), why, relays: Vec::new() })
            .into_iter()
            .collect();
    }
    let outside: Vec<&LocalAddress> = ours.iter().filter(|o| !o.loopback).collect();
    let share = |o: usize, t: usize| {
        let (Some(o), Some(t)) = (outside.get(o), theirs.get(t)) else { return false };
        o.ip != t.ip && in_subnet(o.ip, o.prefix, t.ip) && in_subnet(t.ip, t.prefix, o.ip)
    };
    let mut found: Vec<(&str, Route)> = Vec::new();
    for (o, t) in pair_up(outside.len(), theirs.len(), share) {
        let (Some(o), Some(t)) = (outside.get(o), theirs.get(t)) else { continue };
        // A second address of an interface is no second NIC pair.
        if !found.iter().any(|(interface, _)| *interface == o.interface) {
            let why = format!("{}, same subnet /{}", o.interface, o.prefix.max(t.prefix));
            found.push((&o.interface, Route { from: Some(o.ip), to: t.ip, why, relays: Vec::new() }));
        }
    }
    if !found.is_empty() {
        return found.into_iter().map(|(_, route)| route).collect();
    }
    let routed = ordered.into_iter().find_map(|(to, why)| {
        let source = source_for(to).ok()?;
        outside.iter().any(|o| o.ip == source).then(|| Route {
            from: Some(source),
            to: to.ip(),
            why,
            relays: Vec::new(),
        })
    });
    routed.into_iter().collect()
}

/// Returns paths to addresses at which a peer may be sent an error, even if no data may go there.
pub(in crate::rails) fn for_error(theirs: &[Remote]) -> Vec<Route> {
    let routed = |t: &&Remote| !t.ip.is_loopback() && source_for(SocketAddr::new(t.ip, 0)).is_ok();
    let route = |t: &Remote| Route { from: None, to: t.ip, why: "for an error only".to_owned(), relays: Vec::new() };
    theirs.iter().filter(routed).map(route).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(interface: &str, ip: &str, prefix: u8) -> LocalAddress {
        let ip: IpAddr = ip.parse().unwrap();
        LocalAddress { interface: interface.into(), ip, prefix, loopback: ip.is_loopback() }
    }

    fn remote(ip: &str, prefix: u8) -> Remote {
        Remote { ip: ip.parse().unwrap(), prefix }
    }

    #[test]
    fn every_side_of_a_triangle_is_found() {
        let a = [port("ab", "198.51.100.1", 30), port("ac", "203.0.113.1", 30), port("lo", "127.0.0.1", 8)];
        let b = [remote("198.51.100.2", 30), remote("192.0.2.1", 30), remote("127.0.0.1", 8)];
        let c = [remote("192.0.2.2", 30), remote("203.0.113.2", 30)];
        let to =
            |theirs: &[Remote]| routes(&a, theirs, false).into_iter().map(|w| w.to.to_string()).collect::<Vec<_>>();
        assert_eq!(to(&b), ["198.51.100.2"]);
        assert_eq!(to(&c), ["203.0.113.2"]);
    }

    #[test]
    fn two_cables_are_two_ways_and_two_addresses_of_one_are_not() {
        let ours = [port("r0", "10.0.0.1", 24), port("r1", "10.0.1.1", 24), port("r0", "fd00::1", 64)];
        let theirs = [remote("10.0.0.2", 24), remote("10.0.1.2", 24), remote("fd00::2", 64)];
        let found = routes(&ours, &theirs, false);
        let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.0.0.1 -> 10.0.0.2 (r0, same subnet /24)", "10.0.1.1 -> 10.0.1.2 (r1, same subnet /24)"]);
    }

    #[test]
    fn within_a_host_one_way_is_enough() {
        let ours = [port("eth0", "10.0.0.1", 24), port("lo", "127.0.0.1", 8)];
        let theirs = [remote("10.0.0.1", 24), remote("127.0.0.1", 8)];
        assert_eq!(routes(&ours, &theirs, true).len(), 1);
        assert_eq!(routes(&ours[1..], &theirs[1..], true)[0].to.to_string(), "127.0.0.1");
        assert_eq!(list(&ours), "eth0 10.0.0.1/24, lo 127.0.0.1/8");
        assert_eq!(list_remote(&theirs), "10.0.0.1/24, 127.0.0.1/8");
    }

    #[test]
    fn nothing_in_common_is_no_route() {
        // TEST-NET-3: no port of ours is there, and a route would not begin at 192.0.2.1, which no interface has.
        assert_eq!(routes(&[port("x", "192.0.2.1", 30)], &[remote("203.0.113.9", 30)], false), []);
    }
}
