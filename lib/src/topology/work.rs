//! What each algorithm costs per window, in units of the model: hops, messages, bytes, additions.
//!
//! Bytes are counted in multiples of a window of one segment. Terms with n-1, D and log₂n are those of the tables in
//! [`crate::algorithm`]; the tests hold them against the verifier's counts.

use crate::algorithm::{Shape, binary_tree, double_tree, halving_doubling, supports};
use crate::wire::{Algorithm, Collective};

/// What a core does for one window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Load {
    /// Messages sent plus messages received.
    pub(super) messages: f64,
    /// Bytes sent plus bytes received.
    pub(super) bytes: f64,
    /// Bytes combined.
    pub(super) reduced: f64,
}

/// What a collective costs for one window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Work {
    /// Longest chain of messages.
    pub(super) hops: f64,
    /// Bytes that pass one after the other on that chain.
    pub(super) path_bytes: f64,
    /// Bytes combined one after the other on that chain.
    pub(super) path_reduced: f64,
    /// The rank that has most to do.
    pub(super) busiest: Load,
    /// The average over the ranks.
    pub(super) mean: Load,
}

/// The work of an algorithm; `None` when it cannot do the collective.
pub(super) fn work(algorithm: Algorithm, shape: &Shape) -> Option<Work> {
    if !supports(algorithm, shape) {
        return None;
    }
    if shape.ranks == 1 {
        return Some(Work::default());
    }
    let mut work = match algorithm {
        Algorithm::Ring => ring(shape),
        Algorithm::Tree => tree(shape, 1.0),
        Algorithm::DoubleTree => two_trees(shape),
        Algorithm::Direct => direct(shape),
        Algorithm::HalvingDoubling => halving_doubling(shape),
        Algorithm::AllPairs => all_pairs(shape),
        Algorithm::OneShot | Algorithm::TwoShot => return None,
    };
    let channels = match algorithm {
        Algorithm::DoubleTree => double_tree::channels(shape),
        _ => shape.channels,
    };
    work.busiest.messages *= channels as f64;
    work.mean.messages *= channels as f64;
    if !shape.collective.reduces() && shape.collective != Collective::Barrier {
        work.path_reduced = 0.0;
        work.busiest.reduced = 0.0;
        work.mean.reduced = 0.0;
    }
    Some(work)
}

fn is_all_reduce(shape: &Shape) -> bool {
    matches!(shape.collective, Collective::AllReduce | Collective::Barrier)
}

/// The same on every rank: the path is its load, with the two ends of a message put together.
fn symmetric(hops: f64, load: Load) -> Work {
    Work { hops, path_bytes: load.bytes / 2.0, path_reduced: load.reduced, busiest: load, mean: load }
}

/// Messages of n-1 edges, spread over n ranks.
fn spread(n: f64) -> Load {
    Load { messages: 2.0 * (n - 1.0) / n, bytes: 2.0 * (n - 1.0) / n, reduced: (n - 1.0) / n }
}

fn ring(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let around = n - 1.0;
    match shape.collective {
        _ if is_all_reduce(shape) => {
            symmetric(2.0 * around, Load { messages: 4.0 * around, bytes: 4.0 * around / n, reduced: around / n })
        }
        Collective::Broadcast | Collective::Reduce => {
            let ends = (n - 1.0).min(2.0);
            let busiest = Load { messages: ends, bytes: ends, reduced: 1.0 };
            Work { hops: around, path_bytes: around, path_reduced: around, busiest, mean: spread(n) }
        }
        _ => symmetric(around, Load { messages: 2.0 * around, bytes: 2.0 * around, reduced: around }),
    }
}

/// One tree that carries `share` of the window.
fn tree(shape: &Shape, share: f64) -> Work {
    let n = shape.ranks as f64;
    let depth = f64::from(binary_tree::depth(shape.ranks));
    // Children, and neighbours, of the rank that has most: 2 ranks are one edge, 3 a chain.
    let children = if shape.ranks <= 3 { 1.0 } else { 2.0 };
    let neighbours = (n - 1.0).min(3.0);
    let ways = if is_all_reduce(shape) { 2.0 } else { 1.0 };
    let mean = spread(n);
    Work {
        hops: ways * depth,
        // At each level a rank takes from one side and gives to the other: half of beta each.
        path_bytes: ways * depth * (1.0 + children) / 2.0 * share,
        path_reduced: depth * children * share,
        busiest: Load { messages: ways * neighbours, bytes: ways * neighbours * share, reduced: children * share },
        mean: Load { messages: ways * mean.messages, bytes: ways * mean.bytes * share, reduced: mean.reduced * share },
    }
}

/// Two trees, each with half; an inner node of one is a leaf of the other.
fn two_trees(shape: &Shape) -> Work {
    let one = tree(shape, 0.5);
    let ways = if is_all_reduce(shape) { 2.0 } else { 1.0 };
    let (busiest, mean) = (one.busiest, one.mean);
    Work {
        // Both an inner node (two halves) and the root (one half of each tree) combine a whole window.
        busiest: Load { messages: (busiest.messages + ways) / 2.0, bytes: busiest.bytes + ways / 2.0, reduced: 1.0 },
        mean: Load { bytes: 2.0 * mean.bytes, reduced: 2.0 * mean.reduced, ..mean },
        ..one
    }
}

fn direct(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    if !shape.collective.has_root() {
        return symmetric(1.0, Load { messages: 2.0 * others, bytes: 2.0 * others, reduced: others });
    }
    // The root's end of every message, and one end of its own at the last peer.
    let busiest = Load { messages: others, bytes: others, reduced: others };
    Work { hops: 1.0, path_bytes: n / 2.0, path_reduced: others, busiest, mean: spread(n) }
}

fn halving_doubling(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    if !is_all_reduce(shape) {
        // n-1 messages; of an exchange of k messages two are under way at a time.
        return symmetric(n / 2.0, Load { messages: 2.0 * (n - 1.0), bytes: 2.0 * (n - 1.0), reduced: n - 1.0 });
    }
    let bits = shape.ranks.ilog2();
    let size = 1usize << bits;
    let span = (size / 2).clamp(1, halving_doubling::MAX_SPAN);
    let cube = size as f64;
    // Messages of one phase, each way: 1 per exchange, more where a block is longer than a message may be.
    let phase: usize = (0..bits).map(|bit| (1usize << bit).div_ceil(span)).sum();
    let inside = Load { messages: 4.0 * phase as f64, bytes: 4.0 * (cube - 1.0) / cube, reduced: (cube - 1.0) / cube };
    let hops = 2.0 * phase as f64;
    if size == shape.ranks {
        return symmetric(hops, inside);
    }
    // The folded ranks' data comes in, and the result goes out.
    let extra = n - cube;
    let fold = 2.0 * size.div_ceil(span) as f64;
    let busiest = Load { messages: inside.messages + fold, bytes: inside.bytes + 2.0, reduced: inside.reduced + 1.0 };
    let mean = Load {
        messages: (cube * inside.messages + 2.0 * extra * fold) / n,
        bytes: (cube * inside.bytes + 4.0 * extra) / n,
        reduced: (n - 1.0) / n,
    };
    let (path_bytes, path_reduced) = (inside.bytes / 2.0 + 2.0, busiest.reduced);
    Work { hops: hops + 2.0, path_bytes, path_reduced, busiest, mean }
}

/// Every window in n parts; each rank combines one.
fn all_pairs(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    let reduced = others / n;
    if is_all_reduce(shape) {
        return symmetric(2.0, Load { messages: 4.0 * others, bytes: 4.0 * others / n, reduced });
    }
    // Everybody swaps parts; then the root takes a finished one from each.
    let busiest = Load { messages: 3.0 * others, bytes: 3.0 * others / n, reduced };
    let messages = 2.0 * others + 2.0 * others / n;
    let mean = Load { messages, bytes: messages / n, reduced };
    Work { hops: 2.0, path_bytes: others / n + 0.5, path_reduced: reduced, busiest, mean }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::program;
    use crate::schedule::verify::verify;
    use crate::schedule::{Program, Step};

    /// Load of each rank, counted in the programs.
    fn loads(programs: &[Program]) -> Vec<Load> {
        let parts = programs[0].parts as f64;
        let load = |program: &Program| {
            let mut load = Load::default();
            for step in program.lanes.iter().flat_map(|lane| &lane.steps) {
                let size = step.parts().len() as f64 / parts;
                let ends = [step.source(), step.destination()].into_iter().flatten().count() as f64;
                load.messages += ends;
                load.bytes += ends * size;
                if !matches!(
                    step,
                    Step::Send { .. } | Step::Recv { .. } | Step::Copy { .. } | Step::RecvCopySend { .. }
                ) {
                    load.reduced += size;
                }
            }
            load
        };
        programs.iter().map(load).collect()
    }

    #[test]
    fn the_figures_are_those_of_the_programs() {
        for algorithm in Algorithm::ALL {
            for collective in Collective::ALL {
                for ranks in 2..=33 {
                    for channels in [1, 2] {
                        let shape = Shape { collective, ranks, root: ranks / 2, channels };
                        let Some(work) = work(algorithm, &shape) else { continue };
                        let programs: Vec<_> = (0..ranks).filter_map(|r| program(algorithm, &shape, r)).collect();
                        let report = verify(&programs, &shape, 2, 1, false).unwrap();
                        let name = format!("{algorithm} {shape:?}: {work:?}");
                        let loads = loads(&programs);
                        let max = |f: fn(&Load) -> f64| loads.iter().map(f).fold(0.0, f64::max);
                        let mean = |f: fn(&Load) -> f64| loads.iter().map(f).sum::<f64>() / ranks as f64;
                        let same = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} counted, {b} in {name}");
                        same(f64::from(report.hops), work.hops);
                        same(mean(|l| l.messages), work.mean.messages);
                        same(mean(|l| l.bytes), work.mean.bytes);
                        same(mean(|l| l.reduced), work.mean.reduced);
                        // A tree that is cut off at the right may lack a node with all neighbours.
                        let close =
                            |a: f64, b: f64| assert!(a <= b + 1e-9 && b <= 1.6 * a, "{a} counted, {b} in {name}");
                        close(max(|l| l.messages), work.busiest.messages);
                        close(max(|l| l.bytes), work.busiest.bytes);
                        close(max(|l| l.reduced), work.busiest.reduced);
                    }
                }
            }
        }
    }
}
