use std::collections::BTreeMap;

use approx::{assert_relative_eq, relative_eq};
use proptest::prelude::*;

use super::machine::{Dgx, FatTree, Graph, Host, Protocol, Switch, Torus};
use super::*;
use crate::algorithm::{program, supports};
use crate::schedule::verify::verify;
use crate::topology::CostModel;
use crate::wire::Collective;

const ALPHA: f64 = 2e-6;
const BETA: f64 = 1e-10;
const GAMMA: f64 = 3e-11;

fn switch(ranks: usize) -> Switch {
    let costs = Costs { reduce: GAMMA, ..Costs::default() };
    Switch { ranks, latency: ALPHA, bandwidth: 1.0 / BETA, costs }
}

fn shape(collective: Collective, ranks: usize) -> Shape {
    Shape { collective, ranks, root: 0, channels: 1 }
}

fn call(algorithm: Algorithm, shape: Shape, count: usize, max_message: usize) -> Scenario {
    Scenario { algorithm, shape, count, elem_size: 4, max_message }
}

fn time(call: &Scenario, machine: &dyn Machine) -> f64 {
    let report = simulate(call, machine, &Limits::default()).unwrap();
    let (parts, steps): (f64, f64) = (
        report.critical.iter().map(|c| c.1).sum(),
        report.steps.iter().map(|s| s.1).sum::<f64>() + machine.costs().call,
    );
    close(parts, report.time, "the critical path's parts");
    close(steps, report.time, "the critical path's steps");
    report.time
}

#[track_caller]
fn close(got: f64, expected: f64, what: &str) {
    let equal = relative_eq!(got, expected, epsilon = 1e-18, max_relative = 1e-9);
    assert!(equal, "{what}: {got}, expected {expected}");
}

#[test]
fn a_message_takes_alpha_plus_n_beta() {
    for bytes in [0usize, 4, 4096, 1 << 20] {
        let call = call(Algorithm::Direct, shape(Collective::Broadcast, 2), bytes / 4, 1 << 30);
        close(time(&call, &switch(2)), ALPHA + bytes as f64 * BETA, "broadcast");
    }
}

#[test]
fn two_messages_on_one_link_get_half_of_it_each() {
    let call = |ranks| call(Algorithm::Direct, shape(Collective::Broadcast, ranks), 1 << 20, 1 << 30);
    let n = 4.0 * f64::from(1 << 20);
    close(time(&call(2), &switch(2)), ALPHA + n * BETA, "alone");
    // All messages of the root share its port.
    close(time(&call(3), &switch(3)), ALPHA + 2.0 * n * BETA, "two at once");
    close(time(&call(5), &switch(5)), ALPHA + 4.0 * n * BETA, "four at once");
}

#[test]
fn a_half_duplex_link_is_shared_by_its_directions() {
    let text = |duplex: &str| {
        format!(
            r#"{{"node": [{{"name": "a", "ranks": 1}}, {{"name": "b", "ranks": 1}}],
                 "link": [{{"between": ["a", "b"], "latency_us": 2, "bandwidth_gb_s": 10, "duplex": "{duplex}"}}]}}"#
        )
    };
    let call = call(Algorithm::Direct, shape(Collective::AllReduce, 2), 1 << 20, 1 << 30);
    let machine = |duplex| Graph::new(&serde_json::from_str(&text(duplex)).unwrap()).unwrap();
    let n = 4.0 * f64::from(1 << 20);
    close(time(&call, &machine("full")), ALPHA + n * BETA, "full");
    close(time(&call, &machine("half")), ALPHA + 2.0 * n * BETA, "half");
}

#[test]
fn a_ring_on_a_switch_is_the_textbook_s() {
    for ranks in [2, 3, 4, 8, 17, 64] {
        let count = ranks * 1000;
        let (n, part) = (ranks as f64, 4000.0);
        let ring = |collective| time(&call(Algorithm::Ring, shape(collective, ranks), count, 1 << 30), &switch(ranks));
        let expected = 2.0 * (n - 1.0) * (ALPHA + part * BETA) + (n - 1.0) * part * GAMMA;
        close(ring(Collective::AllReduce), expected, "all_reduce");
        let segment = 4.0 * count as f64;
        close(ring(Collective::AllGather), (n - 1.0) * (ALPHA + segment * BETA), "all_gather");
        close(ring(Collective::ReduceScatter), (n - 1.0) * (ALPHA + segment * (BETA + GAMMA)), "reduce_scatter");
    }
}

#[test]
fn a_tree_on_a_switch_is_the_textbook_s() {
    // A path of d hops, with two children each after the first: their messages share their parent's port.
    for (ranks, depth) in [(2usize, 1.0), (4, 2.0), (8, 3.0), (16, 4.0), (64, 6.0)] {
        let s = 4.0 * 1000.0;
        let call = call(Algorithm::Tree, shape(Collective::Broadcast, ranks), 1000, 1 << 30);
        close(time(&call, &switch(ranks)), depth * ALPHA + (1.0 + 2.0 * (depth - 1.0)) * s * BETA, "broadcast");
        // Upwards two messages share a port as well, and are added one after the other.
        let call = super::Scenario { shape: shape(Collective::Reduce, ranks), ..call };
        let level = ALPHA + 2.0 * s * BETA + 2.0 * s * GAMMA;
        let last = ALPHA + s * (BETA + GAMMA);
        close(time(&call, &switch(ranks)), (depth - 1.0) * level + last, "reduce");
    }
}

#[test]
fn a_hypercube_on_a_switch_is_the_textbook_s() {
    for log in [1u32, 2, 3, 6, 10, 16] {
        let ranks = 1usize << log;
        let (d, s) = (f64::from(log), 4.0 * 1000.0);
        let call = call(Algorithm::RecursiveDoubling, shape(Collective::AllReduce, ranks), 1000, 1 << 30);
        close(time(&call, &switch(ranks)), d * (ALPHA + s * (BETA + GAMMA)), "all_reduce");
    }
}

/// Machines of all kinds with places for `ranks`.
fn machines(ranks: usize) -> Vec<Box<dyn Machine>> {
    vec![
        Box::new(switch(ranks)),
        Box::new(Switch { costs: Costs { call: 1e-6, overhead: 5e-7, reduce: GAMMA, copy: GAMMA }, ..switch(ranks) }),
        Box::new(Dgx::new(ranks, Protocol::Simple)),
        Box::new(Torus::new(ranks)),
        Box::new(FatTree::new(ranks, 2.0)),
        Box::new(Host::new(&CostModel::shm(), ranks, ranks.div_ceil(2), 1 << 20, false)),
    ]
}

/// One rank per class, or after folding, for any size.
const SMALL: Limits = Limits { all_ranks: 0, steps: u64::MAX / 32, messages: u64::MAX };

#[test]
fn programs_repeat_where_folding_says_so() {
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for ranks in [2, 3, 4, 6, 8, 16, 32] {
                let shape = Shape { channels: 2, ..shape(collective, ranks) };
                let Some(translation) = Translation::of(algorithm, &shape).filter(|_| supports(algorithm, &shape))
                else {
                    continue;
                };
                let moved = |rank: usize, by: usize| match translation {
                    Translation::Rotation => (rank + by) % ranks,
                    Translation::Xor => rank ^ by,
                };
                let view = |rank: usize, by: usize| -> Vec<_> {
                    let program = program(algorithm, &shape, rank).unwrap();
                    let step = |s: &crate::schedule::Step| {
                        let peer = |p: Option<usize>| p.map(|p| moved(p, by));
                        (std::mem::discriminant(s), peer(s.source()), peer(s.destination()), s.parts().len())
                    };
                    program.lanes.iter().map(|l| (l.channel, l.steps.iter().map(step).collect::<Vec<_>>())).collect()
                };
                for by in 0..ranks {
                    assert_eq!(view(0, by), view(moved(0, by), 0), "{algorithm} {collective} {ranks} {by}");
                }
            }
        }
    }
}

#[test]
fn machines_repeat_where_they_say_so() {
    for ranks in [2, 4, 8, 16, 32, 64, 128] {
        for machine in machines(ranks) {
            for translation in [Translation::Rotation, Translation::Xor] {
                let Some(block) = machine.period(translation, ranks) else { continue };
                assert!(ranks % block == 0 && block < ranks);
                let route = |from, to| {
                    let mut links = vec![];
                    (machine.route(from, to, &mut links).to_bits(), links)
                };
                let fold = |(latency, links): (u64, Vec<machine::LinkId>)| {
                    (latency, links.iter().map(|l| (l.kind, l.at as usize % block)).collect::<Vec<_>>())
                };
                for (from, to) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))).filter(|(a, b)| a != b) {
                    let moved = |rank: usize| match translation {
                        Translation::Rotation => (rank + block) % ranks,
                        Translation::Xor => rank ^ block,
                    };
                    let (here, there) = (fold(route(from, to)), fold(route(moved(from), moved(to))));
                    assert_eq!(here, there, "{} {from} to {to}", machine.name());
                }
            }
        }
    }
}

#[test]
fn folded_and_refined_are_as_all_ranks() {
    let mut seen = BTreeMap::new();
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for (ranks, windows) in [(4usize, 1usize), (6, 3), (16, 2), (32, 1)] {
                let shape = shape(collective, ranks);
                if !supports(algorithm, &shape) || program(algorithm, &shape, 0).is_none() {
                    continue;
                }
                if ranks > 16 && messages_per_window(algorithm, &shape) > 1000 {
                    continue; // minutes
                }
                // All parts are equally long.
                let count = ranks * 64 * 16 * windows;
                let (parts, span) = crate::algorithm::cut(algorithm, &shape).unwrap();
                let call = call(algorithm, shape, count, count * 4 / windows / parts * span);
                assert_eq!(call.windows(), Some(windows));
                for machine in machines(ranks) {
                    let all = simulate(&call, &*machine, &Limits { all_ranks: u64::MAX, ..SMALL }).unwrap();
                    assert_eq!(all.method, Method::all(ranks));
                    let few = simulate(&call, &*machine, &SMALL).unwrap();
                    close(
                        few.time,
                        all.time,
                        &format!("{algorithm} {collective} {ranks} {}: {}", machine.name(), few.method),
                    );
                    close(few.bandwidth_bound(), all.bandwidth_bound(), "the fullest link");
                    *seen
                        .entry((algorithm.name(), few.method.folded.is_some(), few.method.refined.is_some()))
                        .or_insert(0) += 1;
                }
            }
        }
    }
    // The shortcuts were taken, not only compared with themselves.
    let taken = |name: &str, folded, refined| seen.keys().any(|k| k.0 == name && (k.1 == folded || k.2 == refined));
    assert!(
        taken("ring", true, true) && taken("recursive-doubling", true, true) && taken("tree", true, true),
        "{seen:?}"
    );
}

#[test]
fn a_long_call_goes_on_as_it_did() {
    let limits = |messages| Limits { all_ranks: 0, messages, ..SMALL };
    for (algorithm, collective, windows) in [
        (Algorithm::Tree, Collective::AllReduce, 150),
        (Algorithm::DoubleTree, Collective::AllReduce, 150),
        (Algorithm::Ring, Collective::Broadcast, 150),
        (Algorithm::RecursiveDoubling, Collective::AllReduce, 150),
    ] {
        let ranks = 32;
        let count = 1024 * ranks * windows;
        let (parts, span) = crate::algorithm::cut(algorithm, &shape(collective, ranks)).unwrap();
        let call = call(algorithm, shape(collective, ranks), count, count * 4 / windows / parts * span);
        for machine in machines(ranks).into_iter().take(3) {
            let all = simulate(&call, &*machine, &limits(u64::MAX)).unwrap();
            assert_eq!(all.method.extrapolated, None);
            let few = simulate(&call, &*machine, &limits(all.messages / 2)).unwrap();
            let off = (few.time - all.time).abs() / all.time;
            let what = format!(
                "{algorithm} {collective} {}: {} beside {}, {:?}",
                machine.name(),
                few.time,
                all.time,
                few.method
            );
            assert!(few.method.extrapolated.is_some(), "{what}");
            // Near, or within its own stated uncertainty.
            assert!(off < 0.02 || off * all.time < 2.0 * few.uncertainty(), "{off} {what}");
        }
    }
}

#[test]
fn a_long_ring_goes_on_as_it_did() {
    let ranks = 512;
    let call = call(Algorithm::Ring, shape(Collective::AllReduce, ranks), ranks * 64, 1 << 20);
    let machine = Dgx::new(ranks, Protocol::Simple);
    let all = simulate(&call, &machine, &SMALL).unwrap();
    let few = simulate(&call, &machine, &Limits { messages: all.messages / 2, ..SMALL }).unwrap();
    assert!(few.method.extrapolated.is_some_and(|e| e.what == report::Repeats::Steps), "{:?}", few.method);
    assert_relative_eq!(few.time, all.time, max_relative = 0.02);
}

#[test]
fn what_is_too_large_says_how_many() {
    let error = |algorithm, ranks, limits: &Limits| {
        let call = call(algorithm, shape(Collective::AllReduce, ranks), 1 << 20, 1 << 19);
        simulate(&call, &Dgx::new(ranks, Protocol::Simple), limits).unwrap_err().to_string()
    };
    let direct = error(Algorithm::Direct, 65_536, &Limits::default());
    assert!(direct.contains("34359214080 messages, 4294901760 of them in a window"), "{direct}");
    let few = error(Algorithm::Tree, 4096, &Limits { all_ranks: 0, messages: 10, ..Limits::default() });
    assert!(few.contains("nothing in the call repeats"), "{few}");
    let call = call(Algorithm::Ring, shape(Collective::AllReduce, 9), 8, 1 << 20);
    let places = simulate(&call, &switch(8), &Limits::default()).unwrap_err().to_string();
    assert!(places.contains("has 8 ranks, 9 were asked for"), "{places}");
}

/// Every pair of ranks has a separate link, and processors take no time: nothing is shared.
fn mesh(ranks: usize) -> Graph {
    let node = |at: usize| serde_json::json!({"name": at.to_string(), "ranks": 1});
    let link = |a: usize, b: usize| {
        let between = [a.to_string(), b.to_string()];
        serde_json::json!({"between": between, "latency_us": ALPHA * 1e6, "bandwidth_gb_s": 1e-9 / BETA, "duplex": "full"})
    };
    let nodes: Vec<_> = (0..ranks).map(node).collect();
    let links: Vec<_> = (0..ranks).flat_map(|b| (0..b).map(move |a| link(a, b))).collect();
    Graph::new(&serde_json::from_value(serde_json::json!({"node": nodes, "link": links})).unwrap()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// The bound is loose: with shared links or processors, a few more bytes can take less time, because they change
    /// which transfers overlap (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). The worst case of a
    /// long search took 8 % less: a ring on the host, whose ranks no longer copied in step.
    #[test]
    fn twice_the_bytes_never_take_less_and_no_link_is_faster_than_it_is(
        algorithm in 0usize..10, collective in 0usize..9, ranks in 2usize..20, which in 0usize..6,
        count in 0usize..40_000, root in 0usize..20,
    ) {
        let shape = Shape { root: root % ranks, ..shape(Collective::ALL[collective], ranks) };
        let algorithm = Algorithm::ALL[algorithm];
        prop_assume!(supports(algorithm, &shape));
        let machine = machines(ranks).swap_remove(which);
        let report = |count| simulate(&call(algorithm, shape, count, 1 << 30), &*machine, &Limits::default()).unwrap();
        let (once, twice) = (report(count), report(2 * count));
        prop_assert!(twice.time >= once.time * (1.0 - 1e-9), "{} after {}", twice.time, once.time);
        prop_assert!(once.time >= once.bandwidth_bound());
        prop_assert!(twice.time >= twice.bandwidth_bound());
    }

    #[test]
    fn where_nothing_is_shared_more_bytes_never_take_less(
        algorithm in 0usize..10, collective in 0usize..9, ranks in 2usize..20,
        count in 0usize..40_000, more in 1usize..40_000, root in 0usize..20,
    ) {
        let shape = Shape { root: root % ranks, ..shape(Collective::ALL[collective], ranks) };
        let algorithm = Algorithm::ALL[algorithm];
        prop_assume!(supports(algorithm, &shape));
        let machine = mesh(ranks);
        let time = |count| time(&call(algorithm, shape, count, 1 << 30), &machine);
        let (fewer, more) = (time(count), time(count + more));
        prop_assert!(more >= fewer * (1.0 - 1e-9), "{more} after {fewer}");
    }

    #[test]
    fn bytes_on_links_are_those_that_the_verifier_counts(
        algorithm in 0usize..10, collective in 0usize..9, ranks in 2usize..12, count in 0usize..30_000,
        channels in 1usize..3, message in 9u32..18,
    ) {
        let shape = Shape { channels, ..shape(Collective::ALL[collective], ranks) };
        let algorithm = Algorithm::ALL[algorithm];
        prop_assume!(supports(algorithm, &shape));
        let call = call(algorithm, shape, count, 1 << message);
        let programs: Vec<_> = (0..ranks).map(|r| program(algorithm, &shape, r).unwrap()).collect();
        let verified = verify(&programs, &shape, 2, 1, false).unwrap();
        let partition = programs[0].partition(count, 4, 1 << message);
        let report = simulate(&call, &switch(ranks), &Limits::default()).unwrap();
        for rank in 0..ranks {
            let out = report.links.iter().find(|l| l.name == format!("rank {rank} out")).map_or(0.0, |l| l.bytes);
            prop_assert_eq!(out, verified.bytes_sent(rank, &partition) as f64);
        }
    }
}

/// Given back to it as a schedule of the caller's, an algorithm takes the time that it has.
#[test]
fn a_schedule_of_the_callers_takes_the_same_time() {
    use crate::schedule::Schedule;
    let machine = Dgx::new(8, Protocol::Simple);
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::AllPairs] {
        let shape = Shape { collective: Collective::AllReduce, ranks: 8, root: 0, channels: 1 };
        let call = Scenario { algorithm, shape, count: 100_003, elem_size: 4, max_message: 1 << 16 };
        let expected = simulate(&call, &machine, &Limits::default()).unwrap();
        let programs = (0..8).map(|rank| crate::algorithm::program(algorithm, &shape, rank).unwrap()).collect();
        let schedule = Schedule::new(shape, programs).unwrap();
        let cut = Cut { count: 100_003, elem_size: 4, max_message: 1 << 16 };
        let report = simulate_schedule(&schedule, cut, &machine, &Limits::default()).unwrap();
        assert_eq!((report.time, report.messages), (expected.time, expected.messages), "{algorithm}");
        let few = Limits { messages: 10, ..Limits::default() };
        let error = simulate_schedule(&schedule, cut, &machine, &few).unwrap_err().to_string();
        assert!(error.contains("at most 10 can be simulated"), "{error}");
        let small = Dgx::new(4, Protocol::Simple);
        assert!(simulate_schedule(&schedule, cut, &small, &few).unwrap_err().to_string().contains("8 were asked for"));
    }
}

/// Two hosts of four ranks, joined by a cable that is slower than their memory. A ring takes 7/4 of what the hierarchy
/// takes over it.
#[test]
fn a_hierarchy_sends_less_between_hosts_than_a_ring() {
    let node = |name| {
        let inside = serde_json::json!({"latency_us": 0.1, "bandwidth_gb_s": 10.0});
        serde_json::json!({"name": name, "ranks": 4, "inside": inside})
    };
    let cable = serde_json::json!({"between": ["a", "b"], "latency_us": 2.0, "bandwidth_gb_s": 1.25});
    let described = serde_json::json!({"node": [node("a"), node("b")], "link": [cable]});
    let machine = Graph::new(&serde_json::from_value(described).unwrap()).unwrap();
    let hosts = machine.hosts(8);
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
        let shape = shape(collective, 8);
        let call = |algorithm| call(algorithm, shape, 4 << 20, 1 << 18);
        let took = |algorithm| simulate_on(&call(algorithm), &hosts, &machine, &Limits::default()).unwrap().time;
        let [ring, hierarchy] = [Algorithm::Ring, Algorithm::Hierarchical].map(took);
        assert!(ring > 1.6 * hierarchy, "{collective}: {hierarchy} after {ring}");
        let bound = machine.bound(&shape).unwrap().seconds_per_byte * f64::from(16 << 20);
        assert!((1.0..1.1).contains(&(hierarchy / bound)), "{collective}: {hierarchy}, bound {bound}");
        let named = simulate(&call(Algorithm::Hierarchical), &machine, &Limits::default()).unwrap().time;
        assert_eq!(named, hierarchy);
    }
}

/// Hosts whose ranks are numbered in turn: a ring in rank order leaves a host at every hop.
#[test]
fn rings_take_the_ranks_of_a_host_one_after_the_other() {
    let nodes: Vec<_> = (0..6).map(|rank| serde_json::json!({"name": rank.to_string(), "ranks": 1})).collect();
    let switches = ["a", "b"].map(|name| serde_json::json!({"name": name}));
    let link = |a: String, b: &str, gb_s: f64| serde_json::json!({"between": [a, b], "latency_us": 1.0, "bandwidth_gb_s": gb_s});
    let mut links: Vec<_> = (0..6).map(|rank| link(rank.to_string(), ["a", "b"][rank % 2], 10.0)).collect();
    links.push(link("a".to_owned(), "b", 1.0));
    let nodes: Vec<_> = nodes.into_iter().chain(switches).collect();
    let machine =
        Graph::new(&serde_json::from_value(serde_json::json!({"node": nodes, "link": links})).unwrap()).unwrap();
    let call = call(Algorithm::Ring, shape(Collective::AllReduce, 6), 4 << 20, 1 << 18);
    let took = |labels: &[usize]| simulate_on(&call, &Hosts::of(labels), &machine, &Limits::default()).unwrap().time;
    let [natural, in_turn] = [took(&[0; 6]), took(&[0, 1, 0, 1, 0, 1])];
    assert!(natural > 2.5 * in_turn, "{in_turn} after {natural}");
}
