use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::simulate::machine::Graph;
use crate::simulate::packing::choice::GAIN;
use crate::simulate::{Limits, Scenario, simulate, simulate_schedule};
use crate::wire::Algorithm;

fn node(name: &str, ranks: usize) -> Value {
    json!({"name": name, "ranks": ranks, "inside": {"latency_us": 0.2, "bandwidth_gb_s": 8.0}})
}

fn link(a: &str, b: &str, gb_s: f64) -> Value {
    json!({"between": [a, b], "latency_us": 5.0, "bandwidth_gb_s": gb_s})
}

fn graph(nodes: Vec<Value>, links: Vec<Value>) -> Graph {
    Graph::new(&serde_json::from_value(json!({"node": nodes, "link": links})).unwrap()).unwrap()
}

fn hosts(count: usize) -> Vec<String> {
    (0..count).map(|host| format!("host{host}")).collect()
}

/// Hosts below switches: the switch of each host, and the links with their rates.
fn switched(below: &[(&str, f64)], above: &[(&str, &str, f64)]) -> Graph {
    let names = hosts(below.len());
    let mut nodes: Vec<Value> = names.iter().map(|name| node(name, 1)).collect();
    let mut switches: Vec<&str> =
        below.iter().map(|below| below.0).chain(above.iter().flat_map(|a| [a.0, a.1])).collect();
    switches.sort_unstable();
    switches.dedup();
    nodes.extend(switches.iter().map(|name| json!({"name": name})));
    let legs = names.iter().zip(below).map(|(name, (switch, rate))| link(name, switch, *rate));
    graph(nodes, legs.chain(above.iter().map(|(a, b, rate)| link(a, b, *rate))).collect())
}

/// The kinds of network that the records measure.
fn networks() -> Vec<(&'static str, Graph)> {
    let ring = |count: usize, open: bool| {
        let names = hosts(count);
        let links = (0..count - usize::from(open)).map(|at| link(&names[at], &names[(at + 1) % count], 1.0));
        graph(names.iter().map(|name| node(name, 1)).collect(), links.collect())
    };
    vec![
        ("dumb-bell", switched(&[("l", 2.0), ("r", 2.0), ("l", 2.0), ("r", 2.0)], &[("l", "r", 1.0)])),
        ("ring", ring(6, false)),
        ("line", ring(5, true)),
        ("two hosts", graph(vec![node("a", 4), node("b", 4)], vec![link("a", "b", 1.0)])),
        (
            "fat tree",
            switched(
                &[("x", 1.0), ("y", 1.0), ("x", 1.0), ("y", 0.25), ("x", 1.0), ("y", 1.0)],
                &[("x", "top", 2.0), ("y", "top", 1.0)],
            ),
        ),
        ("slow leg", switched(&[("s", 1.0), ("s", 1.0), ("s", 0.25), ("s", 1.0), ("s", 1.0)], &[])),
    ]
}

pub(super) const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
];

/// Time of the packing, and that of the fastest algorithm of the library, beside the bound.
fn times(machine: &Graph, collective: Collective, channels: usize, count: usize) -> [f64; 2] {
    let shape = Shape { collective, ranks: machine.ranks(), root: 0, channels };
    let cut = Cut { count, elem_size: 4, max_message: 1 << 18 };
    let schedule = pack(machine, &shape, cut).unwrap();
    let packed = simulate_schedule(&schedule, cut, machine, &Limits::default()).unwrap().time;
    let others = Algorithm::ALL.into_iter().filter(|algorithm| crate::algorithm::supports(*algorithm, &shape));
    let others = others.map(|algorithm| {
        let call = Scenario { algorithm, shape, count, elem_size: 4, max_message: 1 << 18 };
        simulate(&call, machine, &Limits::default()).unwrap().time
    });
    let bound = machine.bound(&shape).unwrap().seconds_per_byte * (4 * count) as f64;
    [packed / bound, others.fold(f64::INFINITY, f64::min) / bound]
}

/// As the links allow, to a tenth; the library's own algorithms, whose orders know nothing of the links, are slower by
/// half or more on most of these networks.
#[test]
fn long_calls_take_what_the_links_allow() {
    for (name, machine) in networks() {
        for collective in COLLECTIVES {
            let [packed, fastest] = times(&machine, collective, 4, 4 << 20);
            assert!((1.0..1.1).contains(&packed), "{name}, {collective}: {packed}");
            assert!(packed < fastest * GAIN, "{name}, {collective}: {packed} after {fastest}");
        }
    }
    let gain = |(_, machine): (_, Graph)| {
        let [packed, fastest] = times(&machine, Collective::AllReduce, 1, 4 << 20);
        fastest > 1.5 * packed
    };
    assert!(networks().into_iter().map(gain).filter(|gain| *gain).count() >= 4);
}

/// Prints how long it takes; no time is asserted.
#[test]
fn sixteen_nodes_are_planned() {
    let legs: Vec<(&str, f64)> = (0..16).map(|host| (["l", "r"][host % 2], 2.0)).collect();
    let machine = switched(&legs, &[("l", "r", 4.0)]);
    let shape = Shape { collective: Collective::AllReduce, ranks: 16, root: 0, channels: 1 };
    let cut = Cut { count: 1 << 18, elem_size: 4, max_message: 1 << 18 };
    let started = std::time::Instant::now();
    pack(&machine, &shape, cut).unwrap();
    let packed = started.elapsed();
    assert!(place(&machine, &shape, cut).unwrap().is_some());
    println!("16 nodes: {packed:?} for trees, {:?} with other orders", started.elapsed());
}

#[test]
fn what_cannot_be_packed_is_said() {
    let (_, machine) = networks().remove(0);
    let cut = Cut { count: 100, elem_size: 4, max_message: 1 << 18 };
    let error = |collective, ranks| {
        let shape = Shape { collective, ranks, root: 0, channels: 1 };
        pack(&machine, &shape, cut).unwrap_err().to_string()
    };
    assert!(error(Collective::AllToAll, 4).contains("no packed trees for all_to_all"));
    assert!(error(Collective::AllReduce, 5).contains("expected 2 to 4 ranks"));
    assert!(error(Collective::AllReduce, 1).contains("got 1"));
}

/// Half of a ring's messages cross between the switches of the dumb-bell in rank order, and two of eight in another
/// one.
#[test]
fn an_algorithm_is_faster_with_the_ranks_where_they_suit_the_links() {
    let find = |wanted: &str| networks().into_iter().find(|(name, _)| *name == wanted).unwrap().1;
    let cut = Cut { count: 8 << 20, elem_size: 4, max_message: 1 << 18 };
    let shape = |ranks| Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
    let today = |machine: &Graph, algorithm| {
        let call =
            Scenario { algorithm, shape: shape(machine.ranks()), count: cut.count, elem_size: 4, max_message: 1 << 18 };
        simulate(&call, machine, &Limits::default()).unwrap().time
    };
    let dumb_bell = find("dumb-bell");
    let (algorithm, time, schedule) = place(&dumb_bell, &shape(4), cut).unwrap().unwrap();
    assert!(1.3 * time < today(&dumb_bell, algorithm), "{algorithm}: {time}");
    let again = simulate_schedule(&schedule, cut, &dumb_bell, &Limits::default()).unwrap().time;
    assert!((again / time - 1.0).abs() < 1e-9, "{again}, {time}");
    let two_hosts = find("two hosts");
    let (algorithm, time, _) = place(&two_hosts, &shape(8), cut).unwrap().unwrap();
    assert_eq!(algorithm, Algorithm::Hierarchical);
    assert!(1.3 * time < today(&two_hosts, Algorithm::Ring), "{time}");
    // Its neighbours are neighbours, and every host has one rank.
    assert!(place(&find("ring"), &shape(6), cut).unwrap().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// [`Schedule::new`] proves it.
    #[test]
    fn every_packing_is_right(
        legs in proptest::collection::vec((0usize..3, 1u32..9, 1usize..4), 2..5), spine in 1u32..9,
        collective in 0usize..5, channels in 1usize..5, root in 0usize..12, count in 0usize..3000,
    ) {
        let names = hosts(legs.len());
        let switches = ["s0", "s1", "s2"];
        let mut nodes: Vec<Value> = names.iter().zip(&legs).map(|(name, leg)| node(name, leg.2)).collect();
        nodes.extend(switches.map(|name| json!({"name": name})));
        let legs = names.iter().zip(&legs).map(|(name, leg)| link(name, switches[leg.0], f64::from(leg.1)));
        let spine = [("s0", "s1"), ("s1", "s2")].map(|(a, b)| link(a, b, f64::from(spine)));
        let machine = graph(nodes, legs.chain(spine).collect());
        let ranks = machine.ranks();
        let shape = Shape { collective: COLLECTIVES[collective], ranks, root: root % ranks, channels };
        let cut = Cut { count, elem_size: 4, max_message: 1 << 12 };
        let schedule = pack(&machine, &shape, cut).unwrap();
        let has_form = (0..ranks).any(|rank| shape.in_place(rank).is_some());
        prop_assert_eq!(schedule.in_place().is_ok(), has_form, "{:?}", schedule.in_place());
    }
}
