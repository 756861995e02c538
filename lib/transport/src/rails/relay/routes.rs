//! Paths over known nodes: a graph of those that share a subnet.

use std::net::{IpAddr, SocketAddr};

use crate::bootstrap::interface::{in_subnet, pair_up};
use crate::rails::address::handle::Handle;
use crate::rails::address::ports::{Remote, Route};
use crate::relay::Routes;

/// Most relays of a stream.
pub(super) const MOST: usize = 3;

/// Returns the relays as text.
pub(in crate::rails) fn relays_text(relays: &[SocketAddr]) -> String {
    let names: Vec<String> = relays.iter().map(|r| r.ip().to_string()).collect();
    format!("relay{} {}", if names.len() > 1 { "s" } else { "" }, names.join(" and "))
}

/// Addresses of two neighbours in common subnets, one pair of them per NIC pair; of IPv4, where there are some.
fn shared(from: &[Remote], to: &[Remote]) -> Vec<(IpAddr, IpAddr)> {
    let share = |f: usize, t: usize| {
        let (Some(f), Some(t)) = (from.get(f), to.get(t)) else { return false };
        !f.ip.is_loopback() && f.ip != t.ip && in_subnet(f.ip, f.prefix, t.ip) && in_subnet(t.ip, t.prefix, f.ip)
    };
    let pairs = pair_up(from.len(), to.len(), share);
    let ends = |(f, t): (usize, usize)| Some((from.get(f)?.ip, to.get(t)?.ip));
    let mut all: Vec<(IpAddr, IpAddr)> = pairs.into_iter().filter_map(ends).collect();
    if all.iter().any(|(ip, _)| ip.is_ipv4()) {
        all.retain(|(ip, _)| ip.is_ipv4());
    }
    all
}

/// Returns the paths over the known nodes: along the shortest route, and along others of this length that have no relay
/// in common with it; over each NIC pair of theirs. By `turn`, several processes of one relay are used in turn.
pub(super) fn routes(own: &Handle, target: &Handle, known: &[Handle], turn: usize) -> Vec<Route> {
    let mut hosts: Vec<&Handle> = vec![own, target];
    for node in known {
        if hosts.iter().all(|host| host.host != node.host) {
            hosts.push(node);
        }
    }
    hosts.sort_by_key(|host| host.addresses.iter().map(|a| a.ip).filter(|ip| !ip.is_loopback()).min());
    let mut chains: Vec<Vec<&Handle>> = Vec::new();
    while let Some(relays) = shortest(&hosts, own, target) {
        if relays.len() > MOST || chains.first().is_some_and(|first| first.len() < relays.len()) {
            break;
        }
        hosts.retain(|host| relays.iter().all(|relay| relay.host != host.host));
        chains.push(relays);
    }
    let all: Vec<Vec<Route>> = chains.iter().map(|relays| over_pairs(own, relays, target, known, turn)).collect();
    // Each route once, then each again.
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    (0..most).flat_map(|pair| all.iter().filter_map(move |routes| routes.get(pair).cloned())).collect()
}

/// Returns the relays between two nodes along the shortest route, seen from the first one. Not empty.
fn shortest<'a>(hosts: &[&'a Handle], own: &Handle, target: &Handle) -> Option<Vec<&'a Handle>> {
    let index = |of: &Handle| hosts.iter().position(|host| host.host == of.host);
    let at = |index: usize| hosts.get(index).copied();
    let reach =
        |a: usize, b: usize| at(a).zip(at(b)).is_some_and(|(a, b)| !shared(&a.addresses, &b.addresses).is_empty());
    let path = Routes::new(hosts.len(), reach).path(index(own)?, index(target)?)?;
    let mut relays: Vec<&Handle> = path.through.iter().filter_map(|relay| at(*relay)).collect();
    if path.ends.first() != index(own).as_ref() {
        relays.reverse();
    }
    Some(relays)
}

/// Returns the paths along a route: as many as the hop with the most NIC pairs has.
fn over_pairs(own: &Handle, chain: &[&Handle], target: &Handle, known: &[Handle], turn: usize) -> Vec<Route> {
    let stops: Vec<&Handle> = [own].into_iter().chain(chain.iter().copied()).chain([target]).collect();
    let neighbours = stops.iter().zip(stops.iter().skip(1));
    let hops: Vec<Vec<(IpAddr, IpAddr)>> = neighbours.map(|(a, b)| shared(&a.addresses, &b.addresses)).collect();
    let route = |pair: usize| {
        let pairs = hops.iter().map(|pairs| pairs.get(pair % pairs.len().max(1)).copied());
        let pairs: Vec<(IpAddr, IpAddr)> = pairs.collect::<Option<_>>()?;
        let acceptor = |(relay, (_, to)): (&&Handle, &(IpAddr, IpAddr))| {
            let acceptors: Vec<&Handle> = known.iter().filter(|node| node.host == relay.host).collect();
            Some(acceptors.get(turn % acceptors.len().max(1))?.acceptor_at(*to))
        };
        let relays: Vec<SocketAddr> = chain.iter().zip(&pairs).map(acceptor).collect::<Option<_>>()?;
        let why = format!("no subnet in common, through {}", relays_text(&relays));
        Some(Route { from: Some(pairs.first()?.0), to: pairs.last()?.1, why, relays })
    };
    (0..hops.iter().map(Vec::len).max().unwrap_or(0)).filter_map(route).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bootstrap::interface::LocalAddress;
    use crate::rails::relay::LISTENER;

    /// A node with these subnets, in each of which it is the host `end`.
    pub(in crate::rails::relay) fn node(host: u64, addresses: &[&str]) -> Handle {
        let address = |ip: &&str| LocalAddress {
            interface: "x".to_owned(),
            ip: ip.parse().unwrap(),
            prefix: 30,
            loopback: false,
        };
        let all: Vec<LocalAddress> = addresses.iter().map(address).collect();
        Handle::new([0; 16], host, LISTENER, (1000 + host as u16, 1000), (&all, &[]))
    }

    /// Returns the acceptors and the end of the only path; nothing without one.
    fn acceptors(routes: &[Route]) -> Vec<String> {
        assert!(routes.len() <= 1, "{routes:?}");
        routes.iter().flat_map(|w| w.relays.iter().map(ToString::to_string).chain([w.to.to_string()])).collect()
    }

    #[test]
    fn a_line_has_one_way_and_both_ends_take_the_same_relays() {
        // 9 - 7 - 8 - 6: the numbers of the hosts do not count.
        let nodes = [
            node(9, &["10.0.1.1"]),
            node(7, &["10.0.1.2", "10.0.2.1"]),
            node(8, &["10.0.2.2", "10.0.3.1"]),
            node(6, &["10.0.3.2"]),
        ];
        let there = routes(&nodes[0], &nodes[3], &nodes[1..3], 0);
        assert_eq!(there[0].from.unwrap().to_string(), "10.0.1.1");
        assert_eq!(there[0].why, "no subnet in common, through relays 10.0.1.2 and 10.0.2.2");
        assert_eq!(acceptors(&there), ["10.0.1.2:1007", "10.0.2.2:1008", "10.0.3.2"]);
        let back = routes(&nodes[3], &nodes[0], &nodes[1..3], 0);
        assert_eq!(acceptors(&back), ["10.0.3.1:1008", "10.0.2.1:1007", "10.0.1.1"]);
        assert_eq!(acceptors(&routes(&nodes[0], &nodes[2], &nodes[1..], 0)), ["10.0.1.2:1007", "10.0.2.2"]);
        assert_eq!(routes(&nodes[0], &nodes[3], &nodes[1..2], 0), [], "a relay has not answered");
        assert_eq!(routes(&nodes[0], &nodes[1], &nodes[2..], 0), [], "neighbours need none");
    }

    /// Nodes of which each has a NIC pair with the next one, and the last one to the first.
    fn ring(count: u64) -> Vec<Handle> {
        let near =
            |i: u64| node(i, &[&format!("10.0.{}.1", i + 1), &format!("10.0.{}.2", (i + count - 1) % count + 1)]);
        (0..count).map(near).collect()
    }

    #[test]
    fn a_ring_goes_the_short_way_and_processes_have_their_turns() {
        let nodes = ring(5);
        let to = |from: usize, to: usize| acceptors(&routes(&nodes[from], &nodes[to], &nodes, 0));
        assert_eq!(to(0, 2), ["10.0.1.2:1001", "10.0.2.2"]);
        assert_eq!(to(2, 0), ["10.0.2.1:1001", "10.0.1.1"]);
        assert_eq!(to(0, 3), ["10.0.5.1:1004", "10.0.4.1"]);
        let second = Handle { ports: (2001, 0), ..nodes[1].clone() };
        let known = [nodes[1].clone(), second];
        let relay = |turn| acceptors(&routes(&nodes[0], &nodes[2], &known, turn))[0].clone();
        assert_eq!((relay(0), relay(1), relay(2)), ("10.0.1.2:1001".into(), "10.0.1.2:2001".into(), relay(0)));
    }

    #[test]
    fn ways_of_one_length_are_all_taken_and_so_are_all_cables() {
        let relays_text = |routes: Vec<Route>| routes.iter().map(ToString::to_string).collect::<Vec<_>>();
        let nodes = ring(4);
        let through = |relay: &str| format!("(no subnet in common, through relay {relay})");
        assert_eq!(
            relays_text(routes(&nodes[0], &nodes[2], &nodes, 0)),
            [
                format!("10.0.1.1 -> 10.0.2.2 {}", through("10.0.1.2")),
                format!("10.0.4.2 -> 10.0.3.1 {}", through("10.0.4.1")),
            ]
        );
        // Two pairs to the relay, one behind it; an address of IPv6 is no third one.
        let mut line = [
            node(0, &["10.0.1.1", "10.0.2.1", "fd00::1"]),
            node(1, &["10.0.1.2", "10.0.2.2", "10.0.3.1", "fd00::2"]),
            node(2, &["10.0.3.2"]),
        ];
        line.iter_mut().for_each(|node| node.ports.1 = 7);
        assert_eq!(
            relays_text(routes(&line[0], &line[2], &line, 0)),
            [
                format!("10.0.1.1 -> 10.0.3.2 {}", through("10.0.1.2")),
                format!("10.0.2.1 -> 10.0.3.2 {}", through("10.0.2.2")),
            ]
        );
    }
}
