//! Jobs on machines that are made up, and measurements as their links would give them.

use proptest::prelude::*;

use super::*;
use crate::topology::machine::Numa;
use crate::topology::pairs::{networks, pairs, sites};
use tinynccl_plan::simulate::machine::{Graph, Machine as _};

fn machine(numa: usize, gpus: Vec<Gpu>) -> Machine {
    let numa = (0..numa).map(|number| Numa { number, cores: (4 * number..4 * number + 4).collect() }).collect();
    Machine { processor: "Xeon".to_owned(), numa, socket_gb_s: 22.0, gpus, no_nvml: None }
}

/// A rank on a machine, of which it is the first if `host` is its own number.
fn rank(rank: usize, host: usize, numa: usize, ports: Vec<Port>) -> Told {
    Told {
        host,
        hostname: format!("h{host}"),
        namespace: 1,
        memory: host,
        numa,
        ports,
        machine: (rank == host).then(|| machine(numa + 1, Vec::new())),
    }
}

fn port(interface: &str, address: &str, mbit: Option<u32>) -> Port {
    Port { interface: interface.to_owned(), addresses: vec![(address.parse().unwrap(), 24)], mbit, slot: None }
}

/// The graph, where `speed` gives the microseconds and GB/s between two ranks.
fn graph(told: &[Told], speed: impl Fn(usize, usize) -> (f64, f64)) -> Description {
    let far = |a: usize, b: usize| speed(a, b).1 == 0.0;
    let sites = sites(told);
    let networks = networks(told, &sites, far);
    let measured: Vec<Measured> = pairs(told, &sites, &networks)
        .into_iter()
        .map(|[a, b]| {
            let (us, gb_s) = speed(a, b);
            Measured { ranks: [a, b], alpha_ns: 1e3 * us, gb_s }
        })
        .collect();
    let model = CostModel::shm();
    let (sites, networks, measured) = (&sites, &networks, &measured);
    assemble(&Found { told, sites, networks, measured, model: &model, rails: false })
}

/// Narrowest link in GB/s, and latency in microseconds, from rank to rank.
fn way(description: &Description, from: usize, to: usize) -> (f64, f64) {
    let graph = Graph::new(description).unwrap_or_else(|error| panic!("{error}: {description:?}"));
    let mut links = Vec::new();
    let latency = graph.route(from, to, &mut links);
    let narrowest = links.iter().map(|&link| graph.bandwidth(link)).fold(f64::INFINITY, f64::min);
    (short(narrowest / 1e9), short(latency * 1e6))
}

fn kinds(description: &Description) -> Vec<(&str, &str)> {
    description.node.iter().map(|node| (node.name.as_str(), node.kind.as_deref().unwrap_or(""))).collect()
}

#[test]
fn ranks_of_one_host_share_its_memory() {
    let told: Vec<Told> = (0..4).map(|r| rank(r, 0, 0, vec![port("eth0", "10.0.0.1", None)])).collect();
    let graph = graph(&told, |_, _| (0.3, 5.0));
    assert_eq!((graph.name.as_str(), graph.node[0].numbers.len()), ("h0", 0));
    assert_eq!(kinds(&graph), [("h0", "host"), ("h0/eth0", "port")]);
    let home = &graph.node[0];
    // Two pairs at once on four cores, both ways.
    assert_eq!((home.ranks, home.inside), (4, Some(Inside { latency_us: 0.3, bandwidth_gb_s: 20.0 })));
    assert!(graph.node[1].note.as_deref().unwrap().contains("speed unknown"), "{graph:?}");
}

#[test]
fn numa_nodes_have_their_ranks_whatever_their_numbers() {
    let told: Vec<Told> = (0..4)
        .map(|r| {
            let machine = (r == 0).then(|| machine(2, Vec::new()));
            Told { machine, ..rank(r, 0, 1 - r % 2, vec![]) }
        })
        .collect();
    let graph = graph(&told, |a, b| if (a + b) % 2 == 0 { (0.2, 8.0) } else { (0.6, 3.0) });
    assert_eq!(kinds(&graph), [("h0/numa0", "numa"), ("h0/numa1", "numa")]);
    assert_eq!((&graph.node[0].numbers[..], &graph.node[1].numbers[..]), (&[1, 3][..], &[0, 2][..]));
    assert_eq!((way(&graph, 0, 2), way(&graph, 0, 1)), ((16.0, 0.2), (22.0, 0.6)));
}

#[test]
fn cards_tell_their_speed_and_slow_legs_are_measured() {
    let hosts = |mbit: Option<u32>| -> Vec<Told> {
        (0..4).map(|r| rank(r, r, 0, vec![port("eth0", &format!("10.0.0.{}", r + 1), mbit)])).collect()
    };
    let known = graph(&hosts(Some(100_000)), |_, _| (10.0, 2.5));
    assert_eq!(way(&known, 0, 3), (12.5, 10.0), "the card's speed, and the latency of one pair");
    assert_eq!(known.node.iter().filter(|node| node.kind.as_deref() == Some("network")).count(), 1);
    // A star with one slow leg.
    let slow = graph(&hosts(None), |a, b| (20.0, if a == 3 || b == 3 { 0.3 } else { 1.2 }));
    assert_eq!([way(&slow, 0, 1).0, way(&slow, 0, 3).0, way(&slow, 3, 2).0], [1.2, 0.3, 0.3]);
    assert_eq!(slow.node.iter().filter(|node| node.kind.as_deref() == Some("network")).count(), 1);
}

#[test]
fn hosts_with_less_between_them_than_within_are_on_two_switches() {
    let told: Vec<Told> =
        (0..6).map(|r| rank(r, r, 0, vec![port("eth0", &format!("10.0.0.{}", r + 1), None)])).collect();
    let graph = graph(&told, |a, b| (20.0, if a % 2 == b % 2 { 2.0 } else { 1.0 }));
    let switches: Vec<&str> =
        kinds(&graph).into_iter().filter(|(_, kind)| *kind == "network").map(|(name, _)| name).collect();
    assert_eq!(switches, ["10.0.0.0/24 switch 0", "10.0.0.0/24 switch 1"]);
    assert_eq!([way(&graph, 0, 4).0, way(&graph, 0, 5).0], [2.0, 1.0]);
}

#[test]
fn a_line_leads_through_its_middle() {
    let cable = |a: usize, b: usize| format!("10.0.{a}.{b}");
    let told = [
        rank(0, 0, 0, vec![port("right", &cable(1, 1), None)]),
        rank(1, 1, 0, vec![port("left", &cable(1, 2), None), port("right", &cable(2, 1), None)]),
        rank(2, 2, 0, vec![port("left", &cable(2, 2), None)]),
    ];
    // Between the ends nothing is measured.
    let graph = graph(&told, |a, b| if a.abs_diff(b) == 2 { (0.0, 0.0) } else { (10.0, [1.0, 0.5][a.min(b)]) });
    assert_eq!([way(&graph, 0, 1), way(&graph, 1, 2), way(&graph, 0, 2)], [(1.0, 10.0), (0.5, 10.0), (0.5, 20.0)]);
}

#[test]
fn gpus_behind_a_switch_and_their_nvlinks() {
    let slot = |path: &str| Slot {
        path: path.split('/').map(str::to_owned).collect(),
        numa: Some(1),
        speed: "32.0 GT/s PCIe".to_owned(),
        lanes: 16,
    };
    let gpu = |busid: &str, links: Vec<(End, u32)>| Gpu {
        name: "H200".to_owned(),
        uuid: String::new(),
        busid: busid.to_owned(),
        sm: 90,
        slot: Some(slot(&format!("r/u/d{busid}/{busid}"))),
        nvlinks: links,
    };
    let switched = vec![gpu("a", vec![(End::Switch, 18)]), gpu("b", vec![(End::Switch, 18)])];
    let direct = vec![gpu("a", vec![(End::Gpu("b".into()), 4)]), gpu("b", vec![(End::Gpu("a".into()), 4)])];
    for (gpus, expected) in [(switched, 18.0 * 20.6), (direct, 4.0 * 20.6)] {
        let card = Port { slot: Some(slot("r/u/dn/n")), ..port("ib0", "10.0.0.1", Some(400_000)) };
        let told = [Told { machine: Some(machine(2, gpus)), ..rank(0, 0, 0, vec![card]) }];
        let mut graph = graph(&told, |_, _| (1.0, 1.0));
        let ends = |a: &str, b: &str| graph.link.iter().any(|link| link.between == [a, b]);
        assert!(ends("h0/numa1", "h0/pcie u") && ends("h0/pcie u", "h0/gpu0") && ends("h0/pcie u", "h0/ib0"));
        assert!(ends("h0/numa0", "h0/numa1"));
        for node in &mut graph.node {
            node.ranks = usize::from(node.kind.as_deref() == Some("gpu"));
            node.numbers.clear();
        }
        assert_eq!(way(&graph, 0, 1).0, short(expected));
    }
}

#[test]
fn three_digits_of_a_measurement() {
    assert_eq!([12.3456, 0.0012345, 99999.0, 1.0].map(short), [12.3, 0.00123, 100_000.0, 1.0]);
    assert_eq!([0.0, -1.0, f64::NAN, f64::INFINITY].map(short), [0.0; 4]);
}

proptest! {
    /// For any reports and measurements, the graph is a machine with all of them, also from its text.
    #[test]
    fn every_job_has_a_graph(
        places in prop::collection::vec((0usize..4, 0usize..2, 0u64..2), 1..12),
        nets in prop::collection::vec((0usize..4, any::<Option<u16>>()), 4),
        speeds in prop::collection::vec(0.01f64..50.0, 16),
    ) {
        let told: Vec<Told> = places
            .iter()
            .enumerate()
            .map(|(r, &(host, numa, namespace))| {
                let first = places.iter().position(|&(other, ..)| other == host).unwrap();
                let (net, mbit) = nets[host];
                let address = format!("10.0.{net}.{}", 2 * host + namespace as usize + 1);
                let ports = vec![port("eth0", &address, mbit.map(|mbit| u32::from(mbit) + 1))];
                let machine = (r == first).then(|| machine(2, Vec::new()));
                Told { namespace, machine, ..rank(r, first, numa, ports) }
            })
            .collect();
        let description = graph(&told, |a, b| (1.0, speeds[(a + b) % speeds.len()]));
        prop_assert_eq!(Graph::new(&description).map(|graph| graph.ranks()).ok(), Some(told.len()), "{:?}", description);
        let text = serde_json::to_string(&description).unwrap();
        prop_assert_eq!(Description::parse(&text).unwrap(), description);
    }
}
