//! Groups that use the links at the same time: packings that know of each other beside packings that do not.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::tests::COLLECTIVES;
use super::*;
use crate::simulate::machine::Graph;
use crate::simulate::{Limits, simulate_together};

/// Hosts with these ranks, and links of 1 GB/s between nodes.
fn graph(ranks: &[usize], switches: usize, links: &[(usize, usize)]) -> Graph {
    let inside = json!({"latency_us": 0.2, "bandwidth_gb_s": 20.0});
    let host = |at: usize| json!({"name": at.to_string(), "ranks": ranks[at], "inside": inside});
    let switch = |at: usize| json!({"name": (ranks.len() + at).to_string()});
    let nodes: Vec<Value> = (0..ranks.len()).map(host).chain((0..switches).map(switch)).collect();
    let link = |(a, b): &(usize, usize)| json!({"between": [a.to_string(), b.to_string()], "latency_us": 5.0, "bandwidth_gb_s": 1.0});
    let links: Vec<Value> = links.iter().map(link).collect();
    Graph::new(&serde_json::from_value(json!({"node": nodes, "link": links})).unwrap()).unwrap()
}

/// Seconds until both groups are done: packed alone, and together.
fn unaware_and_aware(machine: &Graph, groups: &[Vec<usize>], collective: Collective) -> [f64; 2] {
    let cut = Cut { count: 4 << 20, elem_size: 4, max_message: 1 << 18 };
    let shape = |group: &[usize]| Shape { collective, ranks: group.len(), root: 0, channels: 4 };
    let took = |schedules: Vec<Schedule>| {
        let calls: Vec<_> = groups.iter().zip(&schedules).map(|(ranks, s)| (&**ranks, s.programs())).collect();
        let max_message = schedules.iter().map(|schedule| schedule.message(cut.max_message)).min().unwrap();
        simulate_together(&calls, Cut { max_message, ..cut }, machine, &Limits::default()).unwrap().time
    };
    let alone = groups.iter().map(|group| pack(&machine.of(group), &shape(group), cut).unwrap());
    let beside = (0..groups.len()).map(|mine| pack_beside(machine, groups, mine, &shape(&groups[mine]), cut).unwrap());
    let (beside, times): (Vec<_>, Vec<_>) = beside.unzip();
    let aware = took(beside);
    // All groups have found the same packing, and are told its time, about.
    assert!(times.iter().all(|time| (time / aware - 1.0).abs() < 0.03), "{times:?}, {aware}");
    [took(alone.collect()), aware]
}

/// One group spans all hosts, the other one two of them.
#[test]
fn a_group_leaves_a_link_to_another_one_that_has_no_other() {
    let (two, six) = (vec![1, 3], vec![0, 2, 4, 5, 6, 7]);
    let ring: Vec<(usize, usize)> = (0..6).map(|at| (at, (at + 1) % 6)).collect();
    let star: Vec<(usize, usize)> = (0..6).map(|at| (at, 6)).collect();
    let hosts = [2, 2, 1, 1, 1, 1];
    for (name, machine) in [("ring", graph(&hosts, 0, &ring)), ("star", graph(&hosts, 1, &star))] {
        let groups = [six.clone(), two.clone()];
        let [unaware, aware] = unaware_and_aware(&machine, &groups, Collective::AllReduce);
        println!("{name}: {:.2} times", unaware / aware);
        assert!(unaware > 1.2 * aware, "{name}: {aware} after {unaware}");
    }
}

/// If both must cross the same link there is nothing to gain, and nothing is lost.
#[test]
fn groups_without_a_choice_lose_nothing() {
    let machine = graph(&[1; 4], 2, &[(0, 4), (1, 5), (2, 4), (3, 5), (4, 5)]);
    for collective in COLLECTIVES {
        let [unaware, aware] = unaware_and_aware(&machine, &[vec![0, 1], vec![2, 3]], collective);
        assert!(aware < 1.02 * unaware, "{collective}: {aware} after {unaware}");
    }
}

#[test]
fn groups_that_do_not_fit_are_errors() {
    let machine = graph(&[1; 3], 1, &[(0, 3), (1, 3), (2, 3)]);
    let cut = Cut { count: 100, elem_size: 4, max_message: 1 << 18 };
    let error = |groups: &[Vec<usize>], ranks| {
        let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
        pack_beside(&machine, groups, 0, &shape, cut).map(|_| ()).unwrap_err().to_string()
    };
    assert!(error(&[vec![0, 3]], 2).contains("expected 2 to 3 ranks"));
    assert!(error(&[vec![0, 1]], 3).contains("expected 2 to 3 ranks"));
    assert!(error(&[vec![0, 1], vec![1, 2]], 2).contains("rank 1 is in two groups"));
    assert!(error(&[], 2).contains("expected 2 to 3 ranks"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    /// [`Schedule::new`] proves it; groups of any sizes, some of one rank, ranks in any order.
    #[test]
    fn every_packing_beside_others_is_right(
        ranks in Just((0..9usize).collect::<Vec<_>>()).prop_shuffle(), cuts in (2usize..6, 0usize..4),
        collective in 0usize..5, root in 0usize..9, channels in 1usize..3,
    ) {
        let machine = graph(&[2, 1, 2, 1, 2, 1], 2, &[(0, 6), (1, 6), (2, 6), (3, 7), (4, 7), (5, 7), (6, 7)]);
        let (first, second) = (cuts.0, (cuts.0 + cuts.1).min(8));
        let groups = [ranks[..first].to_vec(), ranks[first..second].to_vec(), ranks[second..].to_vec()];
        let cut = Cut { count: 30_000, elem_size: 4, max_message: 1 << 14 };
        let mut times = Vec::new();
        for (mine, group) in groups.iter().enumerate().filter(|(_, group)| group.len() > 1) {
            let shape = Shape { collective: COLLECTIVES[collective], ranks: group.len(), root: 0, channels };
            let root = root % group.len();
            // Roots are the same number in all groups, so that they agree.
            let shape = Shape { root: if shape.collective.has_root() && mine == 0 { root } else { 0 }, ..shape };
            let (schedule, time) = pack_beside(&machine, &groups, mine, &shape, cut).unwrap();
            prop_assert!(schedule.in_place().is_ok());
            times.push((shape.root, time));
        }
        let alike = times.iter().filter(|(root, _)| *root == 0).map(|(_, time)| *time);
        let (least, most) = (alike.clone().fold(f64::INFINITY, f64::min), alike.fold(0.0, f64::max));
        prop_assert!(most == 0.0 || least == most, "{times:?}");
    }
}
