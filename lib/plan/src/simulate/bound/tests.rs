use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::algorithm::supports;
use crate::simulate::machine::{Graph, Machine};
use crate::simulate::{Limits, Scenario, simulate};
use crate::wire::Algorithm;

const B: f64 = 1e9;

fn node(name: &str, ranks: usize, inside: f64) -> Value {
    json!({"name": name, "ranks": ranks, "inside": {"latency_us": 0, "bandwidth_gb_s": inside}})
}

fn link(a: &str, b: &str, gb_s: f64) -> Value {
    json!({"between": [a, b], "latency_us": 0, "bandwidth_gb_s": gb_s})
}

fn graph(nodes: Vec<Value>, links: Vec<Value>) -> Graph {
    Graph::new(&serde_json::from_value(json!({"node": nodes, "link": links})).unwrap()).unwrap()
}

fn star(legs: &[f64]) -> Graph {
    let names: Vec<String> = (0..legs.len()).map(|leg| format!("host{leg}")).collect();
    let mut nodes = vec![json!({"name": "switch"})];
    nodes.extend(names.iter().map(|name| node(name, 1, 1.0)));
    graph(nodes, names.iter().zip(legs).map(|(name, &leg)| link(name, "switch", leg)).collect())
}

/// Two switches with two ranks each, whose links have twice what lies between the switches.
fn dumb_bell() -> Graph {
    let mut nodes: Vec<Value> = ["a", "b", "c", "d"].map(|name| node(name, 1, 1.0)).into();
    nodes.extend([json!({"name": "left"}), json!({"name": "right"})]);
    let legs = [("a", "left"), ("b", "left"), ("c", "right"), ("d", "right")].map(|(a, b)| link(a, b, 2.0));
    graph(nodes, legs.into_iter().chain([link("left", "right", 1.0)]).collect())
}

/// The bound in segments per link of bandwidth [`B`], and the links that it names.
fn of(machine: &Graph, collective: Collective, root: usize) -> (f64, Vec<String>) {
    let shape = Shape { collective, ranks: machine.ranks(), root, channels: 1 };
    let bound = machine.bound(&shape).unwrap();
    ((bound.seconds_per_byte * B * 1e6).round() / 1e6, bound.links)
}

#[test]
fn alike_links_give_the_known_bounds() {
    let machine = star(&[1.0; 5]);
    for (collective, segments) in [
        (Collective::AllGather, 4.0),
        (Collective::ReduceScatter, 4.0),
        (Collective::AllReduce, 1.6),
        (Collective::Broadcast, 1.0),
        (Collective::Reduce, 1.0),
        (Collective::Scatter, 4.0),
        (Collective::Gather, 4.0),
        (Collective::AllToAll, 4.0),
        (Collective::Scan, 1.0),
    ] {
        assert_eq!(of(&machine, collective, 3).0, segments, "{collective}");
    }
    let nothing = Shape { collective: Collective::Barrier, ranks: 5, root: 0, channels: 1 };
    assert_eq!(machine.bound(&nothing), None);
}

#[test]
fn the_narrow_link_is_named() {
    let one_way = |name: &str| vec![name.to_owned()];
    let (segments, links) = of(&dumb_bell(), Collective::AllGather, 0);
    assert_eq!((segments, links.len()), (2.0, 1));
    assert_eq!(of(&dumb_bell(), Collective::Broadcast, 0), (1.0, one_way("left to right")));
    assert_eq!(of(&dumb_bell(), Collective::Broadcast, 3), (1.0, one_way("right to left")));
    assert_eq!(of(&dumb_bell(), Collective::Reduce, 3), (1.0, one_way("left to right")));
    // Two pairs times two segments.
    assert_eq!(of(&dumb_bell(), Collective::AllToAll, 0).0, 4.0);
    assert_eq!(of(&dumb_bell(), Collective::AllReduce, 0).0, 1.0);
    let slow = star(&[1.0, 1.0, 0.25, 1.0]);
    assert_eq!(of(&slow, Collective::AllGather, 0), (12.0, one_way("switch to host2")));
    assert_eq!(of(&slow, Collective::ReduceScatter, 0), (12.0, one_way("host2 to switch")));
    assert_eq!(of(&slow, Collective::AllReduce, 0).0, 4.0);
}

/// A bus carries each copy by itself; the neighbours of a line pass on what they get.
#[test]
fn a_bus_carries_every_copy_and_ranks_pass_on() {
    let bus = graph(vec![node("host", 4, 1.0)], vec![]);
    assert_eq!(of(&bus, Collective::AllGather, 0), (12.0, vec!["inside host".to_owned()]));
    assert_eq!(of(&bus, Collective::AllReduce, 0).0, 6.0);
    assert_eq!(of(&bus, Collective::Broadcast, 0).0, 3.0);
    let line =
        graph(["a", "b", "c"].map(|name| node(name, 1, 1.0)).into(), vec![link("a", "b", 1.0), link("b", "c", 1.0)]);
    assert_eq!(of(&line, Collective::Broadcast, 0).0, 1.0);
    assert_eq!(of(&line, Collective::AllGather, 0).0, 2.0);
    assert_eq!(of(&line, Collective::AllReduce, 0).0, 1.0);
    assert_eq!(of(&line, Collective::Scatter, 0).0, 2.0);
}

/// 128 hosts of eight ranks, below two layers of switches.
#[test]
fn a_thousand_ranks_have_a_bound() {
    let mut nodes: Vec<Value> = (0..128).map(|host| node(&format!("host{host}"), 8, 100.0)).collect();
    nodes.extend((0..17).map(|switch| json!({"name": format!("switch{switch}")})));
    let mut links: Vec<Value> =
        (0..128).map(|host| link(&format!("host{host}"), &format!("switch{}", host / 8), 10.0)).collect();
    links.extend((0..16).map(|leaf| link(&format!("switch{leaf}"), "switch16", 40.0)));
    // A leaf takes in the segments of 960 ranks over 40 GB/s, a host those of 1,016 over 10.
    assert_eq!(of(&graph(nodes, links), Collective::AllGather, 0).0, 101.6);
}

fn machines() -> impl Strategy<Value = Graph> {
    let links = proptest::collection::vec((0usize..7, 0usize..7, 1u32..9), 0..8);
    (proptest::collection::vec((0usize..4, 1u32..9), 2..7), links, 1u32..9).prop_map(|(nodes, links, spine)| {
        let count = nodes.len();
        let name = |at: usize| format!("n{at}");
        let described = nodes.iter().enumerate().map(|(at, &(ranks, inside))| {
            // The first two have ranks in any case.
            node(&name(at), if at < 2 { ranks.max(1) } else { ranks }, f64::from(inside))
        });
        let between = |(a, b, gb_s): (usize, usize, u32)| link(&name(a), &name(b), f64::from(gb_s));
        let spines = (1..count).map(|at| between((at - 1, at, spine)));
        let more = links.into_iter().filter(|(a, b, _)| a < b && *b < count).map(between);
        graph(described.collect(), spines.chain(more).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_schedule_of_ours_is_faster(
        machine in machines(), collective in 0usize..11, root in 0usize..24, count in 1usize..5000,
    ) {
        let ranks = machine.ranks();
        let shape = Shape { collective: Collective::ALL[collective], ranks, root: root % ranks, channels: 1 };
        let bound = machine.bound(&shape).map_or(0.0, |bound| bound.seconds_per_byte) * (4 * count) as f64;
        for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| supports(*algorithm, &shape)) {
            let call = Scenario { algorithm, shape, count, elem_size: 4, max_message: 1 << 12 };
            let time = simulate(&call, &machine, &Limits::default()).unwrap().time;
            prop_assert!(time >= bound * (1.0 - 1e-6), "{algorithm}: {time}, bound {bound}");
        }
    }
}
