use proptest::prelude::*;

use super::*;
use crate::schedule::verify::verify;

const COLLECTIVES: [Collective; 6] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::Barrier,
];

fn programs(shape: &Shape, hosts: &Hosts) -> Vec<Program> {
    (0..shape.ranks).map(|rank| program(shape, hosts, rank).expect("supported")).collect()
}

/// Hosts of these sizes, numbered one after the other.
fn sized(sizes: &[usize]) -> Hosts {
    Hosts::of(&sizes.iter().enumerate().flat_map(|(host, &size)| std::iter::repeat_n(host, size)).collect::<Vec<_>>())
}

fn shape(collective: Collective, hosts: &Hosts, root: usize) -> Shape {
    Shape { collective, ranks: hosts.ranks(), root, channels: 1 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Any hosts, any numbering, any root.
    #[test]
    fn every_program_is_right(
        sizes in proptest::collection::vec(1usize..6, 2..5), numbering in any::<u64>(), collective in 0usize..6,
        root in 0usize..20, channels in 1usize..7, windows in 1usize..4, in_place in any::<bool>(),
    ) {
        let mut labels: Vec<usize> = sizes.iter().enumerate().flat_map(|(host, &size)| vec![host; size]).collect();
        // Fisher and Yates, by a linear congruential generator.
        let mut state = numbering;
        for at in (1..labels.len()).rev().filter(|_| numbering % 3 > 0) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            labels.swap(at, (state >> 33) as usize % (at + 1));
        }
        let hosts = Hosts::of(&labels);
        let ranks = labels.len();
        let shape = Shape { collective: COLLECTIVES[collective], ranks, root: root % ranks, channels };
        prop_assert_eq!(supports(&shape, &hosts), sizes.iter().any(|&size| size > 1));
        if supports(&shape, &hosts) {
            let programs = programs(&shape, &hosts);
            let proved = verify(&programs, &shape, 2, windows, in_place);
            prop_assert!(proved.is_ok(), "{:?} {:?} {:?}", shape, hosts, proved);
            prop_assert!(programs.iter().all(|program| program.parts == parts(&shape, &hosts)));
        }
    }
}

#[test]
fn hops_and_bytes_are_what_the_documentation_says() {
    for (h, m) in [(2, 2), (2, 4), (3, 2), (4, 3), (5, 5)] {
        let hosts = sized(&vec![m; h]);
        let n = h * m;
        for collective in COLLECTIVES {
            let shape = shape(collective, &hosts, m + 1);
            let programs = programs(&shape, &hosts);
            let report = verify(&programs, &shape, 2, 1, false).unwrap();
            let one_way = matches!(collective, Collective::Broadcast | Collective::Reduce);
            let hops = match collective {
                Collective::AllReduce | Collective::Barrier => 2 * h,
                _ if one_way => h + 1,
                _ => h,
            };
            assert_eq!(report.hops as usize, hops, "{collective} on {h} hosts of {m}");
            let enters = |host: usize| {
                let steps = hosts.on(host).iter().flat_map(|&rank| programs[rank].lanes.iter().flat_map(|l| &l.steps));
                steps.filter(|s| s.source().is_some_and(|from| hosts.place(from).unwrap().0 != host)).count() as f64
            };
            let most = (0..h).map(enters).fold(0.0, f64::max) / parts(&shape, &hosts) as f64;
            let share = (h - 1) as f64 / h as f64;
            let expected = match collective {
                Collective::AllReduce | Collective::Barrier => 2.0 * share,
                _ if one_way => 1.0,
                _ => n as f64 * share,
            };
            assert!((most - expected).abs() < 1e-9, "{collective} on {h} hosts of {m}: {most}, expected {expected}");
        }
    }
}

#[test]
fn every_rank_of_a_host_has_a_link_to_the_others() {
    let hosts = Hosts::of(&[0, 1, 0, 1, 0, 1, 1]);
    for collective in COLLECTIVES {
        let programs = programs(&shape(collective, &hosts, 0), &hosts);
        let leaves = |rank: usize| {
            let away = |peer: usize| hosts.place(peer).unwrap().0 != hosts.place(rank).unwrap().0;
            programs[rank].links().iter().filter(|(_, peer)| away(*peer)).count()
        };
        assert_eq!(
            (0..7).map(leaves).collect::<Vec<_>>(),
            [1, 1, 1, 1, 1, 1, 0],
            "{collective}: rank 6 has no partner"
        );
    }
}

#[test]
fn long_calls_have_several_groups() {
    let hosts = sized(&[4, 4]);
    let shape = shape(Collective::AllReduce, &hosts, 0);
    let groups = |bytes| widened(&shape, &hosts, bytes, 1 << 10).channels;
    assert_eq!([8 << 10, 9 << 10, 17 << 10, 1 << 20].map(groups), [1, 2, 3, 8], "8 parts of 1 KiB are a group");
    assert_eq!(widened(&Shape { channels: 9, ..shape }, &hosts, 1 << 20, 1 << 10).channels, 9);
}

/// By group: the order of their stages.
#[test]
fn groups_alternate() {
    let stage = |group: usize, at: usize| vec![Step::send(group, Loc::input(at, 0))];
    let order = |groups: usize, stages: usize, behind| {
        let groups = (0..groups).map(|group| (0..stages).map(|at| stage(group, at)).collect()).collect();
        let steps = alternating(groups, behind);
        steps.iter().map(|s| (s.destination().unwrap(), s.read().unwrap().segment)).collect::<Vec<_>>()
    };
    assert_eq!(order(1, 2, 2), [(0, 0), (0, 1)]);
    let expected = [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (1, 2), (2, 1), (2, 2)];
    assert_eq!(order(3, 3, 2), expected);
    assert_eq!(order(4, 2, 0), [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (3, 1)]);
}

#[test]
fn what_cannot_be_done_is_none() {
    let two = sized(&[2, 2]);
    for (collective, hosts) in [
        (Collective::AllToAll, &two),
        (Collective::Scan, &two),
        (Collective::AllReduce, &sized(&[4])),
        (Collective::AllReduce, &sized(&[1, 1, 1, 1])),
        (Collective::AllReduce, &sized(&[2, 1])),
        (Collective::AllReduce, &Hosts::default()),
    ] {
        let shape = Shape { collective, ranks: 4, root: 0, channels: 1 };
        assert!(!supports(&shape, hosts) && program(&shape, hosts, 0).is_none(), "{collective} {hosts:?}");
    }
    assert!(program(&shape(Collective::AllReduce, &two, 0), &two, 4).is_none());
}
