//! Every algorithm × collective × ranks × roots × channels × windows × in place or not, verified symbolically.

use approx::assert_abs_diff_eq;

use super::*;
use crate::schedule::verify::{Report, verify};

const DEPTH: usize = 2;

fn programs(algorithm: Algorithm, shape: &Shape) -> Vec<Program> {
    (0..shape.ranks).map(|r| program(algorithm, shape, r).expect("supported")).collect()
}

fn check(algorithm: Algorithm, shape: &Shape, windows: usize, in_place: bool) -> Report {
    let all = programs(algorithm, shape);
    verify(&all, shape, DEPTH, windows, in_place)
        .unwrap_or_else(|e| panic!("{algorithm} {shape:?} windows {windows} in place {in_place}: {e}"))
}

/// Shapes of an algorithm up to 17 ranks.
fn shapes(algorithm: Algorithm) -> impl Iterator<Item = Shape> {
    Collective::ALL
        .into_iter()
        .flat_map(|collective| (1..=17).map(move |ranks| (collective, ranks)))
        .flat_map(|(collective, ranks)| {
            let mut roots = if collective.has_root() { vec![0, ranks / 2, ranks - 1] } else { vec![0] };
            roots.dedup();
            roots
                .into_iter()
                .flat_map(move |root| (1..=3).map(move |channels| Shape { collective, ranks, root, channels }))
        })
        .filter(move |shape| supports(algorithm, shape))
}

fn check_all(algorithm: Algorithm) {
    let mut checked = 0;
    for shape in shapes(algorithm) {
        for windows in 1..=3 {
            for in_place in [false, true] {
                let report = check(algorithm, &shape, windows, in_place);
                check_bytes(algorithm, &shape, &report);
                if shape.collective.reduces() && keeps_rank_order(algorithm, &shape) {
                    assert!(report.rank_order, "{algorithm} {shape:?}");
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 500, "{checked}");
}

fn check_bytes(algorithm: Algorithm, shape: &Shape, report: &Report) {
    let programs = programs(algorithm, shape);
    for (count, size, max) in [(0, 4, 4096), (1, 8, 4096), (1001, 4, 4096), (99_991, 2, 8192)] {
        let partition = programs[0].partition(count, size, max);
        for rank in 0..shape.ranks {
            assert_eq!(
                bytes_sent(algorithm, shape, rank, &partition),
                Some(report.bytes_sent(rank, &partition)),
                "{algorithm} {shape:?} rank {rank} count {count}"
            );
        }
    }
}

#[test]
fn ring_is_correct() {
    check_all(Algorithm::Ring);
}

#[test]
fn tree_is_correct() {
    check_all(Algorithm::Tree);
}

#[test]
fn double_tree_is_correct() {
    check_all(Algorithm::DoubleTree);
}

#[test]
fn direct_is_correct() {
    check_all(Algorithm::Direct);
}

#[test]
fn halving_doubling_is_correct() {
    check_all(Algorithm::HalvingDoubling);
}

#[test]
fn all_pairs_is_correct() {
    check_all(Algorithm::AllPairs);
}

#[test]
fn programs_without_partial_sums_are_correct_and_send_as_much() {
    for algorithm in Algorithm::ALL {
        for shape in shapes(algorithm).filter(|shape| shape.combines()) {
            let all: Option<Vec<_>> = (0..shape.ranks).map(|r| program_at_once(algorithm, &shape, r)).collect();
            assert_eq!(all.is_some(), shape.ranks == 1 || keeps_rank_order(algorithm, &shape) && brings_all(algorithm));
            let Some(all) = all else { continue };
            assert!(all.iter().all(|program| program.pairwise().is_none()), "{algorithm} {shape:?}");
            for (windows, depth) in [(1, 1), (2, 1), (3, 2)] {
                for in_place in [false, true] {
                    let report = verify(&all, &shape, depth, windows, in_place)
                        .unwrap_or_else(|e| panic!("{algorithm} {shape:?} {windows} windows, {in_place}: {e}"));
                    assert!(report.rank_order, "{algorithm} {shape:?}");
                    check_bytes(algorithm, &shape, &report);
                }
            }
        }
    }
}

fn brings_all(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::Direct | Algorithm::AllPairs)
}

#[test]
fn a_step_that_adds_by_itself_is_found() {
    for algorithm in Algorithm::ALL {
        for shape in shapes(algorithm).filter(|shape| shape.is_all_reduce() && shape.ranks > 1) {
            let found = programs(algorithm, &shape).iter().any(|program| program.pairwise().is_some());
            assert!(found, "{algorithm} {shape:?}");
        }
    }
    // One sum in two halves, and one that is not finished.
    let add = |from, last| Step::Reduce { src: Loc::input(from, 0), dst: Loc::scratch(0, 0), last };
    let of = |steps| Program { parts: 1, span: 1, scratch_segments: 1, lanes: vec![Lane { channel: 0, steps }] };
    assert_eq!(of(vec![add(1, false), add(2, true)]).pairwise(), None);
    assert!(of(vec![add(1, false), add(2, false)]).pairwise().is_some());
    let copy = Step::Copy { src: Loc::scratch(0, 0), dst: Loc::output(0, 0) };
    assert!(of(vec![add(1, false), copy, add(2, true)]).pairwise().is_some());
}

#[test]
fn recursive_doubling_is_correct() {
    check_all(Algorithm::RecursiveDoubling);
}

#[test]
fn some_algorithm_keeps_rank_order_in_every_collective_and_the_others_are_found_out() {
    for collective in Collective::ALL {
        for ranks in 1..=17 {
            let shape = Shape { collective, ranks, root: ranks - 1, channels: 1 };
            let mut able = Algorithm::ALL.into_iter().filter(|&a| supports(a, &shape));
            let ordered = able.any(|a| keeps_rank_order(a, &shape));
            assert!(ordered || collective == Collective::SendRecv, "{shape:?}");
        }
    }
    let order = |algorithm, ranks| {
        check(algorithm, &Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 }, 1, false).rank_order
    };
    let others = [
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::DoubleTree,
        Algorithm::HalvingDoubling,
        Algorithm::RecursiveDoubling,
    ];
    for algorithm in others {
        assert!(order(algorithm, 2) && !order(algorithm, 4), "{algorithm}");
    }
}

#[test]
fn halving_doubling_is_correct_however_messages_are_cut() {
    for ranks in 2..=33 {
        for span in [1, 2, 3, 7] {
            let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 2 };
            let all: Vec<_> =
                (0..ranks).map(|r| halving_doubling::program_with_span(&shape, r, span).expect("supported")).collect();
            verify(&all, &shape, DEPTH, 2, true).unwrap_or_else(|e| panic!("{ranks} ranks, span {span}: {e}"));
        }
    }
}

#[test]
fn hops_are_what_the_documentation_says() {
    let hops = |algorithm, collective, ranks| {
        check(algorithm, &Shape { collective, ranks, root: 0, channels: 1 }, 1, false).hops
    };
    for n in 2..=17 {
        let log = binary_tree::depth(n);
        assert_eq!(hops(Algorithm::Ring, Collective::AllReduce, n), 2 * (n as u32 - 1));
        assert_eq!(hops(Algorithm::Ring, Collective::ReduceScatter, n), n as u32 - 1);
        assert_eq!(hops(Algorithm::Ring, Collective::Broadcast, n), n as u32 - 1);
        assert_eq!(hops(Algorithm::Tree, Collective::AllReduce, n), 2 * log);
        assert_eq!(hops(Algorithm::Tree, Collective::Broadcast, n), log);
        assert_eq!(hops(Algorithm::DoubleTree, Collective::AllReduce, n), 2 * log);
        for (algorithm, collective) in [
            (Algorithm::Tree, Collective::AllGather),
            (Algorithm::Tree, Collective::ReduceScatter),
            (Algorithm::DoubleTree, Collective::AllGather),
            (Algorithm::DoubleTree, Collective::ReduceScatter),
        ] {
            assert_eq!(hops(algorithm, collective, n), (2 * log - 2).max(1), "{algorithm} {collective} {n}");
        }
        assert_eq!(hops(Algorithm::Direct, Collective::AllReduce, n), 1);
        assert_eq!(hops(Algorithm::Direct, Collective::AllToAll, n), 1);
        assert_eq!(hops(Algorithm::AllPairs, Collective::AllReduce, n), 2);
        assert_eq!(hops(Algorithm::AllPairs, Collective::Reduce, n), 2);
        let fold = if n.is_power_of_two() { 0 } else { 2 };
        assert_eq!(hops(Algorithm::HalvingDoubling, Collective::AllReduce, n), 2 * n.ilog2() + fold);
        // The path from one folded rank to another has all distances only if such ranks are at opposite corners.
        let fold = u32::from(!n.is_power_of_two()) + u32::from(2 * n > 3 << n.ilog2());
        assert_eq!(hops(Algorithm::RecursiveDoubling, Collective::AllReduce, n), n.ilog2() + fold);
    }
}

#[test]
fn bandwidth_is_what_the_documentation_says() {
    let most = |algorithm, collective, ranks| {
        let shape = Shape { collective, ranks, root: 0, channels: 2 };
        let partition = programs(algorithm, &shape)[0].partition(720_720, 4, 1 << 30);
        let bytes = (0..ranks).filter_map(|r| bytes_sent(algorithm, &shape, r, &partition)).max().unwrap();
        bytes as f64 / (720_720.0 * 4.0)
    };
    for n in 2..=17 {
        let (others, inner) = ((n - 1) as f64, if n == 2 { 1.0 } else { 1.0 + (n * (n - 2).min(2)) as f64 });
        assert_eq!(most(Algorithm::Tree, Collective::AllGather, n), inner);
        assert!(most(Algorithm::DoubleTree, Collective::AllGather, n) < n as f64 + 1.001);
        let folded = if n.is_power_of_two() { others } else { 3.0 * others };
        assert!((others..=folded).contains(&most(Algorithm::HalvingDoubling, Collective::AllGather, n)), "{n}");
        for algorithm in [Algorithm::Tree, Algorithm::DoubleTree, Algorithm::HalvingDoubling] {
            assert_eq!(most(algorithm, Collective::ReduceScatter, n), others, "{algorithm} {n}");
        }
    }
    for n in [2, 3, 4, 8, 13, 16] {
        let optimal = 2.0 * (n as f64 - 1.0) / n as f64;
        assert_abs_diff_eq!(most(Algorithm::Ring, Collective::AllReduce, n), optimal, epsilon = 0.01);
        assert_abs_diff_eq!(most(Algorithm::AllPairs, Collective::AllReduce, n), optimal, epsilon = 0.01);
        assert!(most(Algorithm::AllPairs, Collective::Reduce, n) < 1.001);
        assert!(most(Algorithm::DoubleTree, Collective::AllReduce, n) < 2.001);
        assert!(most(Algorithm::DoubleTree, Collective::Broadcast, n) < 1.001);
        if n.is_power_of_two() {
            assert_abs_diff_eq!(most(Algorithm::HalvingDoubling, Collective::AllReduce, n), optimal, epsilon = 0.01);
            assert_eq!(most(Algorithm::RecursiveDoubling, Collective::AllReduce, n), f64::from(n.ilog2()));
        }
        assert_eq!(most(Algorithm::Direct, Collective::AllReduce, n), n as f64 - 1.0);
    }
}

#[test]
fn what_cannot_be_done_is_none() {
    let shape = |collective, ranks, root, channels| Shape { collective, ranks, root, channels };
    for algorithm in Algorithm::ALL {
        for bad in [
            shape(Collective::AllReduce, 0, 0, 1),
            shape(Collective::AllReduce, 4, 0, 0),
            shape(Collective::Broadcast, 4, 4, 1),
            shape(Collective::SendRecv, 4, 0, 1),
            shape(Collective::AllReduce, usize::MAX, 0, 2),
        ] {
            assert!(!supports(algorithm, &bad));
            assert_eq!(program(algorithm, &bad, 0), None);
        }
        assert_eq!(program(algorithm, &shape(Collective::AllReduce, 4, 0, 1), 4), None);
        for good in shapes(algorithm) {
            let program = program(algorithm, &good, good.ranks - 1).expect("supported");
            assert_eq!(cut(algorithm, &good), Some((program.parts, program.span)));
        }
    }
    let shape = shape(Collective::Gather, 4, 0, 1);
    assert_eq!(program(Algorithm::Ring, &shape, 0), None);
    assert_eq!(bytes_sent(Algorithm::Ring, &shape, 0, &Partition::new(1, 1, 1, 1)), None);
}

#[test]
fn segments_are_sent_as_often_as_they_must_be() {
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::DoubleTree, Algorithm::HalvingDoubling] {
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            for ranks in 2..=17 {
                let shape = Shape { collective, ranks, root: 0, channels: 2 };
                let partition = programs(algorithm, &shape)[0].partition(1000, 1, 1 << 20);
                let all: u64 = (0..ranks).filter_map(|r| bytes_sent(algorithm, &shape, r, &partition)).sum();
                assert_eq!(all, 1000 * (ranks * (ranks - 1)) as u64, "{algorithm} {shape:?}");
            }
        }
    }
}

#[test]
fn one_of_many_ranks_costs_its_own_steps_only() {
    let shape = Shape { collective: Collective::AllReduce, ranks: 65_536, root: 0, channels: 1 };
    let steps = |algorithm| program(algorithm, &shape, 40_000).unwrap().lanes[0].steps.len();
    assert_eq!(steps(Algorithm::Ring), 2 * 65_536 - 1);
    assert!(steps(Algorithm::Tree) <= 3);
    assert!(steps(Algorithm::HalvingDoubling) < 600);
    assert_eq!(steps(Algorithm::RecursiveDoubling), 32);
    assert!(steps(Algorithm::DoubleTree) <= 3);
}

#[test]
fn the_largest_message_fits() {
    for shape in shapes(Algorithm::HalvingDoubling) {
        for program in programs(Algorithm::HalvingDoubling, &shape) {
            for (count, size) in [(5, 8), (70_001, 8), (1 << 20, 1)] {
                let partition = program.partition(count, size, 4096);
                for step in program.lanes.iter().flat_map(|lane| &lane.steps) {
                    for w in 0..partition.windows() {
                        assert!(partition.parts(w, step.parts()).len() * size <= 4096);
                    }
                }
            }
        }
    }
}
