//! Compares the terms with counts in the programs.

use approx::abs_diff_eq;

use super::*;
use crate::algorithm::{Hosts, hierarchical as on_hosts, program, program_on};
use crate::schedule::verify::verify;
use crate::schedule::{Program, Step};
use crate::wire::Collective;

/// The work of a rank's program, and the part of its messages that leaves the block.
fn count(program: &Program, rank: usize, placement: Placement) -> (Load, Load) {
    let parts = program.parts as f64;
    let (mut load, mut out) = (Load::default(), Load::default());
    for step in program.lanes.iter().flat_map(|lane| &lane.steps) {
        let size = step.parts().len() as f64 / parts;
        for peer in [step.source(), step.destination()].into_iter().flatten() {
            load.messages += 1.0;
            load.bytes += size;
            if placement.separates(rank, peer) {
                out.messages += 1.0;
                out.bytes += size;
            }
        }
        match step {
            Step::Send { .. } | Step::Recv { .. } | Step::RecvCopySend { .. } => {}
            Step::Copy { .. } => load.copied += size,
            // Reads, writes: a copy, and what combining adds to it.
            Step::Reduce { .. } => (load.copied, load.reduced) = (load.copied + size, load.reduced + size),
            _ => load.reduced += size,
        }
    }
    for lane in &program.lanes {
        // Two of a kind: a different receive means that the message was not sent directly after.
        let from = |step: &Step| match step {
            Step::Recv { from, .. } => Some((*from, false)),
            Step::RecvReduceCopy { from, .. } => Some((*from, true)),
            _ => None,
        };
        let behind = |pair: &&[Step]| from(&pair[0]).is_some() && from(&pair[0]) == from(&pair[1]);
        let behind = lane.steps.windows(2).filter(behind).count();
        // The sender's ends are as many: exchanges are symmetric.
        load.joined += 2.0 * behind as f64;
    }
    (load, out)
}

fn shapes(ranks: std::ops::RangeInclusive<usize>) -> impl Iterator<Item = (Algorithm, Shape)> {
    ranks.flat_map(|ranks| {
        [1, 2].into_iter().flat_map(move |channels| {
            Collective::ALL.into_iter().flat_map(move |collective| {
                let shape = Shape { collective, ranks, root: ranks / 2, channels };
                Algorithm::ALL.into_iter().map(move |algorithm| (algorithm, shape))
            })
        })
    })
}

#[test]
fn the_figures_are_those_of_the_programs() {
    for (algorithm, shape) in shapes(2..=33) {
        let ranks = shape.ranks;
        let Some(work) = work(algorithm, &shape) else { continue };
        let programs: Vec<_> = (0..ranks).filter_map(|r| program(algorithm, &shape, r)).collect();
        let report = verify(&programs, &shape, 2, 1, false).unwrap();
        let name = format!("{algorithm} {shape:?}: {work:?}");
        let loads: Vec<Load> = programs.iter().enumerate().map(|(r, p)| count(p, r, Placement::TOGETHER).0).collect();
        let max = |f: fn(&Load) -> f64| loads.iter().map(f).fold(0.0, f64::max);
        let mean = |f: fn(&Load) -> f64| loads.iter().map(f).sum::<f64>() / ranks as f64;
        let same = |a: f64, b: f64| assert!(abs_diff_eq!(a, b, epsilon = 1e-9), "{a} counted, {b} in {name}");
        same(mean(|l| l.messages), work.mean.messages);
        let segments = matches!(shape.collective, Collective::AllGather | Collective::ReduceScatter);
        let by_others = match algorithm {
            Algorithm::HalvingDoubling => segments && !ranks.is_power_of_two(),
            algorithm => segments && matches!(algorithm, Algorithm::Tree | Algorithm::DoubleTree),
        };
        if by_others {
            // Ranks forward messages, so the terms assume none that travel together.
            assert_eq!((work.mean.joined, work.busiest.joined), (0.0, 0.0), "{name}");
        } else {
            same(mean(|l| l.joined), work.mean.joined);
            same(max(|l| l.joined), work.busiest.joined);
        }
        same(mean(|l| l.bytes), work.mean.bytes);
        same(mean(|l| l.reduced), work.mean.reduced);
        same(mean(|l| l.copied), work.mean.copied);
        same(max(|l| l.copied), work.busiest.copied);
        // A tree that is cut off at the right may lack a node with all neighbours.
        let close = |a: f64, b: f64| assert!(a <= b + 1e-9 && b <= 1.6 * a, "{a} counted, {b} in {name}");
        close(max(|l| l.messages), work.busiest.messages);
        close(max(|l| l.bytes), work.busiest.bytes);
        close(max(|l| l.reduced), work.busiest.reduced);
        let (hops, said) = (f64::from(report.hops), work.path.messages / 2.0);
        if by_others && algorithm == Algorithm::HalvingDoubling {
            // Exchanges of unequal blocks are approximated.
            close(hops, said);
        } else {
            same(hops, said);
        }
    }
}

#[test]
fn a_chain_waits_for_the_other_messages_of_its_ranks() {
    for (algorithm, shape) in shapes(2..=33) {
        let Some(Work { path, .. }) = work(algorithm, &shape) else { continue };
        let ends = |rank| count(&program(algorithm, &shape, rank).unwrap(), rank, Placement::TOGETHER).0.messages;
        let name = format!("{algorithm} {shape:?}: {path:?}");
        match algorithm {
            // All work of the root, and the last peer's end; sent messages count twice.
            Algorithm::Direct if shape.collective.has_root() && shape.channels == 1 => {
                let out = matches!(shape.collective, Collective::Broadcast | Collective::Scatter);
                let times = if out { 2.0 } else { 1.0 };
                assert_eq!(path.queued, times * (ends(shape.root) - 1.0), "{name}");
            }
            // Every rank is in both trees; a hop of one waits for the rank's work in the other.
            Algorithm::DoubleTree => {
                let ways = if shape.is_all_reduce() { 2.0 } else { 1.0 };
                let least = (0..shape.ranks).map(ends).fold(f64::INFINITY, f64::min);
                assert!(least >= 2.0 * ways, "{least} ends in {name}");
                assert_eq!(path.queued, path.messages / 2.0, "{name}");
            }
            _ if shape.channels == 1 => assert_eq!(path.queued, 0.0, "{name}"),
            _ => {}
        }
    }
}

#[test]
fn what_leaves_the_host_is_what_is_counted() {
    for block in [2, 3, 4, 8] {
        let placement = Placement::blocks(block);
        for (algorithm, shape) in shapes(2..=33) {
            // A root in the middle of the ranks, and the first one.
            let root = if shape.channels == 1 { 0 } else { shape.root };
            let shape = Shape { root, ..shape };
            let n = shape.ranks;
            if work(algorithm, &shape).is_none() {
                continue;
            }
            let share = crossing(algorithm, &shape, placement);
            let name = format!("{algorithm} {shape:?} in blocks of {block}: {share:?}");
            for s in [share.path, share.busiest, share.mean] {
                assert!((0.0..=1.0).contains(&s.messages) && (0.0..=1.0).contains(&s.bytes), "{name}");
            }
            let (mut all, mut out) = (Load::default(), Load::default());
            for rank in 0..n {
                let (a, o) = count(&program(algorithm, &shape, rank).unwrap(), rank, placement);
                all = Load { messages: all.messages + a.messages, bytes: all.bytes + a.bytes, ..all };
                out = Load { messages: out.messages + o.messages, bytes: out.bytes + o.bytes, ..out };
            }
            let (messages, bytes) = (out.messages / all.messages, out.bytes / all.bytes);
            let near = |counted: f64, said: f64, slack: f64| {
                assert!(abs_diff_eq!(counted, said, epsilon = slack), "{counted} counted, {said} in {name}");
            };
            // Trees and cubes whose size is not a power of two, or not aligned with the blocks, are approximated.
            let regular = n.is_power_of_two() && block.is_power_of_two();
            let slack = match algorithm {
                // The second channel's chain runs the other way.
                Algorithm::Ring if shape.channels > 1 && shape.collective.has_root() => 1.0 / (n as f64 - 1.0),
                Algorithm::Ring | Algorithm::Direct => 1e-9,
                Algorithm::HalvingDoubling | Algorithm::RecursiveDoubling if regular => 1e-9,
                Algorithm::Tree if regular && shape.root == 0 => 1e-9,
                _ => 0.5,
            };
            near(messages, share.mean.messages, slack);
            near(bytes, share.mean.bytes, slack);
        }
    }
}

#[test]
fn links_of_one_kind_have_no_mixture() {
    for (algorithm, shape) in shapes(2..=9) {
        assert_eq!(crossing(algorithm, &shape, Placement::TOGETHER), Crossing::of(0.0));
        assert_eq!(crossing(algorithm, &shape, Placement::APART), Crossing::of(1.0));
    }
}

#[test]
fn totals_are_those_of_all_windows() {
    let shape = Shape { collective: Collective::AllReduce, ranks: 4, root: 0, channels: 1 };
    let t = terms(Algorithm::Ring, &shape, 1 << 20, 64 << 10).unwrap();
    assert_eq!((t.windows, t.hops(), t.footprint), (4.0, 6.0, 2.0 * (1 << 20) as f64));
    assert_eq!((t.wire_bytes(), t.reduced_bytes()), (3.0 * (1 << 20) as f64, 0.75 * (1 << 20) as f64));
    assert_eq!((t.copied_bytes(), t.syncs()), (0.0, 0.0));
    let gather = Shape { collective: Collective::AllGather, ..shape };
    let t = terms(Algorithm::Direct, &gather, 1000, 64 << 10).unwrap();
    assert_eq!((t.copied_bytes(), t.footprint), (1000.0, 5000.0));
}

/// Exactly where hosts are alike; where they differ the busiest rank and the chain are approximated.
#[test]
fn hierarchical_figures_are_those_of_the_programs() {
    let labels = |sizes: &[usize]| {
        let ranks = sizes.iter().enumerate().flat_map(|(host, &size)| std::iter::repeat_n(host, size));
        Hosts::of(&ranks.collect::<Vec<_>>())
    };
    for sizes in [&[2, 2][..], &[4, 4], &[3, 3, 3], &[8, 8], &[2; 5], &[3, 2], &[4, 2, 3], &[1, 3], &[5, 5, 4, 5]] {
        let hosts = labels(sizes);
        let alike = sizes.iter().all(|size| *size == sizes[0]);
        for (collective, channels) in Collective::ALL.into_iter().flat_map(|c| [(c, 1), (c, 2)]) {
            let ranks = hosts.ranks();
            let shape = Shape { collective, ranks, root: ranks - 1, channels };
            if !on_hosts::supports(&shape, &hosts) {
                continue;
            }
            let programs: Vec<_> =
                (0..ranks).filter_map(|rank| program_on(Algorithm::Hierarchical, &shape, &hosts, rank)).collect();
            let report = verify(&programs, &shape, 2, 1, false).unwrap();
            let (work, share) = hierarchical::work(&shape, &hosts);
            let name = format!("{shape:?} on {sizes:?}: {work:?} {share:?}");
            let loads: Vec<Load> =
                programs.iter().enumerate().map(|(r, p)| count(p, r, Placement::TOGETHER).0).collect();
            let max = |f: fn(&Load) -> f64| loads.iter().map(f).fold(0.0, f64::max);
            let mean = |f: fn(&Load) -> f64| loads.iter().map(f).sum::<f64>() / ranks as f64;
            let same = |a: f64, b: f64| assert!(abs_diff_eq!(a, b, epsilon = 1e-9), "{a} counted, {b} in {name}");
            let close = |a: f64, b: f64| match alike {
                true => assert!(a <= b + 1e-9 && b <= 1.34 * a, "{a} counted, {b} in {name}"),
                false => assert!(a <= 1.5 * b + 1e-9 && b <= 2.0 * a, "{a} counted, {b} in {name}"),
            };
            same(mean(|l| l.messages), work.mean.messages);
            same(mean(|l| l.bytes), work.mean.bytes);
            same(mean(|l| l.reduced), if shape.combines() { work.mean.reduced } else { 0.0 });
            same(mean(|l| l.copied), work.mean.copied);
            same(max(|l| l.copied), work.busiest.copied);
            close(max(|l| l.messages), work.busiest.messages);
            close(max(|l| l.bytes), work.busiest.bytes);
            close(max(|l| l.reduced), work.busiest.reduced);
            // Groups follow each other.
            if channels == 1 {
                close(f64::from(report.hops), work.path.messages / 2.0);
            }
            let leaves = |rank: usize, step: &Step| {
                let away = |peer: usize| hosts.place(peer).unwrap().0 != hosts.place(rank).unwrap().0;
                let peers = [step.source(), step.destination()].into_iter().flatten();
                peers.filter(|&peer| away(peer)).count() as f64
            };
            let steps = |rank: usize| programs[rank].lanes.iter().flat_map(|lane| &lane.steps);
            let out: f64 = (0..ranks).map(|rank| steps(rank).map(|step| leaves(rank, step)).sum::<f64>()).sum();
            same(out / ranks as f64 / work.mean.messages, share.mean.messages);
        }
    }
}
