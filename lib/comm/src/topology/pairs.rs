//! Places of the ranks, and the pairs of ranks that stand for all others in a measurement.
//!
//! A *site* is a network namespace of a machine: its ranks see the same interfaces. One pair is measured for each class
//! of machine inside a NUMA node, one between two of them, and one for each subnet whose ports all know their speed. In
//! a subnet of n sites where one does not, sites at distances 1, 2, 4, … are measured, about n·log2(n) pairs: each port
//! meets several others, and the fastest shows what it can do.

use serde::{Deserialize, Serialize};

use super::machine::{Machine, Port};
use tinynccl_transport::bootstrap::interface::subnet;

/// A rank's report to the others.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    /// The lowest rank of its machine.
    pub(crate) host: usize,
    pub(crate) hostname: String,
    /// Network namespace.
    pub(crate) namespace: u64,
    /// The lowest rank that it shares memory with.
    pub(crate) memory: usize,
    /// NUMA node, by its index.
    pub(crate) numa: usize,
    pub(crate) ports: Vec<Port>,
    /// From the lowest rank of a machine.
    pub(crate) machine: Option<Machine>,
}

/// Ranks that see the same interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Site {
    pub(crate) name: String,
    /// The lowest rank of its machine.
    pub(crate) host: usize,
    pub(crate) ranks: Vec<usize>,
}

/// A network that two or more sites are in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) name: String,
    /// Sites, and their ports by index; no port: one that only the kernel's routes know.
    pub(crate) members: Vec<(usize, Option<usize>)>,
}

impl Network {
    pub(crate) fn has(&self, site: usize) -> bool {
        self.members.iter().any(|&(member, _)| member == site)
    }
}

/// The sites, in the order of their first ranks.
pub(crate) fn sites(told: &[Told]) -> Vec<Site> {
    let mut sites: Vec<(Site, u64)> = Vec::new();
    for (rank, told) in told.iter().enumerate() {
        let known = sites.iter_mut().find(|(site, namespace)| (site.host, *namespace) == (told.host, told.namespace));
        if let Some((site, _)) = known {
            site.ranks.push(rank);
            continue;
        }
        let same = |name: &str| sites.iter().any(|(site, _)| site.name == name);
        let mut name = told.hostname.clone();
        let mut number = 1;
        while same(&name) {
            number += 1;
            name = format!("{}.{number}", told.hostname);
        }
        sites.push((Site { name, host: told.host, ranks: vec![rank] }, told.namespace));
    }
    sites.into_iter().map(|(site, _)| site).collect()
}

/// The subnets that several sites are in, and one more network if there are sites that reach each other otherwise. Two
/// ranks are `far` from each other if they talk through a relay.
pub(crate) fn networks(told: &[Told], sites: &[Site], far: impl Fn(usize, usize) -> bool) -> Vec<Network> {
    let mut networks: Vec<Network> = Vec::new();
    for (at, site) in sites.iter().enumerate() {
        for (port, addresses) in told[site.ranks[0]].ports.iter().map(|port| &port.addresses).enumerate() {
            for &(ip, prefix) in addresses {
                let (name, member) = (subnet(ip, prefix), (at, Some(port)));
                match networks.iter_mut().find(|network| network.name == name) {
                    Some(network) if network.members.contains(&member) => {}
                    Some(network) => network.members.push(member),
                    None => networks.push(Network { name, members: vec![member] }),
                }
            }
        }
    }
    networks.retain(|network| network.members.iter().any(|(site, _)| *site != network.members[0].0));
    let apart = |a: usize, b: usize| {
        let is_common = networks.iter().any(|network| network.has(a) && network.has(b));
        !is_common && !far(sites[a].ranks[0], sites[b].ranks[0])
    };
    let routed: Vec<usize> = (0..sites.len()).filter(|&a| (0..sites.len()).any(|b| a != b && apart(a, b))).collect();
    if !routed.is_empty() {
        // The first port counts: that is where the default route most often leads.
        let port = |site: usize| (!told[sites[site].ranks[0]].ports.is_empty()).then_some(0);
        let members = routed.into_iter().map(|site| (site, port(site))).collect();
        networks.push(Network { name: "routed network".to_owned(), members });
    }
    networks
}

/// Class of a pair of ranks of a site: one pair of a class is measured for all.
pub(crate) fn class(told: &[Told], [a, b]: [usize; 2]) -> Class {
    let machine = told[told[a].host].machine.as_ref();
    Class {
        processor: machine.map_or(String::new(), |machine| machine.processor.clone()),
        cores: machine.map_or(0, |machine| machine.numa.iter().map(|numa| numa.cores.len()).sum()),
        shares_memory: told[a].memory == told[b].memory,
        same_numa: told[a].numa == told[b].numa,
    }
}

/// See [`class`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Class {
    processor: String,
    cores: usize,
    shares_memory: bool,
    same_numa: bool,
}

/// The pairs to measure, the lower rank first.
pub(crate) fn pairs(told: &[Told], sites: &[Site], networks: &[Network]) -> Vec<[usize; 2]> {
    let mut found: Vec<[usize; 2]> = Vec::new();
    let mut classes: Vec<Class> = Vec::new();
    for site in sites {
        // The first rank of the site, and of each NUMA node, with the first one after it of each.
        for (at, &a) in site.ranks.iter().enumerate() {
            for &b in &site.ranks[at + 1..] {
                let class = class(told, [a, b]);
                if !classes.contains(&class) {
                    classes.push(class);
                    found.push([a, b]);
                }
            }
        }
    }
    for network in networks {
        let mut members: Vec<usize> = network.members.iter().map(|(site, _)| *site).collect();
        members.dedup();
        let knows = |&(site, port): &(usize, Option<usize>)| {
            port.is_some_and(|port| told[sites[site].ranks[0]].ports[port].mbit.is_some())
        };
        let know = network.members.iter().all(knows);
        let mut distance = 1;
        while distance < members.len() {
            for (&a, &b) in members.iter().zip(&members[distance..]) {
                let (a, b) = (sites[a].ranks[0], sites[b].ranks[0]);
                let pair = [a.min(b), a.max(b)];
                if !found.contains(&pair) {
                    found.push(pair);
                }
                if know {
                    break;
                }
            }
            distance = if know { members.len() } else { 2 * distance };
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn at(host: usize, namespace: u64, numa: usize, memory: usize) -> Told {
        let hostname = format!("host{host}");
        Told { host, hostname, namespace, numa, memory, ..Told::default() }
    }

    fn port(address: &str, mbit: Option<u32>) -> Port {
        let ip = address.parse().unwrap();
        Port { interface: format!("to {address}"), addresses: vec![(ip, 24)], mbit, slot: None }
    }

    fn plan(told: &[Told]) -> Vec<[usize; 2]> {
        let sites = sites(told);
        pairs(told, &sites, &networks(told, &sites, |_, _| false))
    }

    #[test]
    fn one_pair_for_each_class_inside_a_machine() {
        assert_eq!(plan(&vec![at(0, 1, 0, 0); 4]), [[0, 1]]);
        let numa = [at(0, 1, 0, 0), at(0, 1, 1, 0), at(0, 1, 0, 0), at(0, 1, 1, 0)];
        assert_eq!(plan(&numa), [[0, 1], [0, 2]]);
        // Over TCP: each has memory of its own.
        assert_eq!(plan(&[at(0, 1, 0, 0), at(0, 1, 0, 1), at(0, 1, 0, 2)]), [[0, 1]]);
        assert_eq!(plan(&[at(0, 1, 0, 0)]), [[0; 2]; 0]);
    }

    #[test]
    fn sites_are_told_apart_by_machine_and_namespace() {
        let told = [at(0, 1, 0, 0), at(0, 2, 0, 1), at(2, 1, 0, 2), at(0, 1, 0, 0)];
        let sites = sites(&told);
        assert_eq!(sites.iter().map(|site| site.name.as_str()).collect::<Vec<_>>(), ["host0", "host0.2", "host2"]);
        assert_eq!(sites[0].ranks, [0, 3]);
    }

    #[test]
    fn ports_that_know_their_speed_need_one_pair_and_others_log_n() {
        let hosts = |mbit: Option<u32>, hosts: usize| -> Vec<Told> {
            (0..hosts)
                .map(|host| Told { ports: vec![port(&format!("10.0.0.{host}"), mbit)], ..at(host, 1, 0, host) })
                .collect()
        };
        assert_eq!(plan(&hosts(Some(1000), 5)), [[0, 1]]);
        assert_eq!(plan(&hosts(None, 4)), [[0, 1], [1, 2], [2, 3], [0, 2], [1, 3]]);
        let count = |ranks: usize| plan(&hosts(None, ranks)).len();
        assert_eq!((count(2), count(16)), (1, 15 + 14 + 12 + 8));
    }

    #[test]
    fn networks_are_subnets_and_what_routes_join() {
        let host = |host: usize, addresses: &[&str]| {
            let ports = addresses.iter().map(|address| port(address, None)).collect();
            Told { ports, ..at(host, 1, 0, host) }
        };
        // A line: 0 and 2 talk through 1.
        let told = [host(0, &["10.0.1.1"]), host(1, &["10.0.1.2", "10.0.2.1"]), host(2, &["10.0.2.2", "10.0.9.1"])];
        let sites = sites(&told);
        let of = |far: bool| networks(&told, &sites, |a, b| far && a.abs_diff(b) == 2);
        let names = |networks: Vec<Network>| networks.into_iter().map(|n| (n.name, n.members)).collect::<Vec<_>>();
        let subnets = [
            ("10.0.1.0/24".to_owned(), vec![(0, Some(0)), (1, Some(0))]),
            ("10.0.2.0/24".to_owned(), vec![(1, Some(1)), (2, Some(0))]),
        ];
        assert_eq!(names(of(true)), subnets);
        let routed = names(of(false));
        assert_eq!(routed[..2], subnets);
        assert_eq!(routed[2], ("routed network".to_owned(), vec![(0, Some(0)), (2, Some(0))]));
    }

    proptest! {
        /// Every site with a peer is measured, and no pair twice.
        #[test]
        fn every_site_is_in_a_pair(places in prop::collection::vec((0usize..6, 0usize..2), 2..24)) {
            let told: Vec<Told> = places
                .iter()
                .map(|&(host, numa)| {
                    let first = places.iter().position(|&(other, _)| other == host).unwrap();
                    Told { ports: vec![port(&format!("10.0.0.{}", host + 1), None)], ..at(first, 1, numa, first) }
                })
                .collect();
            let sites = sites(&told);
            let pairs = plan(&told);
            for (n, [a, b]) in pairs.iter().enumerate() {
                prop_assert!(a < b && !pairs[..n].contains(&[*a, *b]));
            }
            if sites.len() > 1 {
                for site in &sites {
                    prop_assert!(pairs.iter().any(|pair| pair.contains(&site.ranks[0])));
                }
            }
        }
    }
}
