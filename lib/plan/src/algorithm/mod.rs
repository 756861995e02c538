//! Algorithms: pure functions from a call to each rank's [`Program`].
//!
//! Nothing here does I/O, reads a clock or depends on a transport. A program costs time and memory in proportion to the
//! rank's own steps, so a simulator can compute one of 65,536 ranks.
//!
//! | algorithm | all_reduce | reduce_scatter, all_gather | broadcast, reduce | gather, scatter, all_to_all, scan | hops of all_reduce |
//! |---|---|---|---|---|---|
//! | [`ring`] | yes | yes | yes (a chain) | | 2(n-1) |
//! | [`tree`] | yes | yes | yes | | 2⌈log₂n⌉ |
//! | [`double_tree`] | yes | yes | yes | | about 2⌈log₂n⌉ |
//! | [`direct`] | yes | yes | yes | yes | 1 |
//! | [`halving_doubling`] | yes | yes | | | 2log₂n, +2 for other n |
//! | [`recursive_doubling`] | yes | | | | log₂n, +1 or +2 for other n |
//! | [`all_pairs`] | yes | | reduce | | 2 |
//! | [`hierarchical`], on h [`Hosts`] | yes | yes | yes | | 2h |
//!
//! A barrier is an all_reduce of nothing: its messages are headers.
//!
//! Each file exports `program` and `bytes_sent`, the closed formula of the payload that a rank sends. Tests compare the
//! formula with the count of the [verifier](crate::schedule::verify).

pub mod all_pairs;
pub mod binary_tree;
mod cube_segments;
pub mod direct;
pub mod double_tree;
pub mod halving_doubling;
pub mod hierarchical;
mod hosts;
mod hypercube;
mod order;
mod rank_order;
pub mod recursive_doubling;
pub mod ring;
pub mod tree;
mod tree_segments;

pub use self::hosts::{Hosts, program_on};
pub use self::order::{Order, program_in_order};
pub use crate::schedule::Shape;
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::{Algorithm, Collective};

/// Returns true if `algorithm` has a schedule for this collective on this many ranks, wherever they run.
pub fn supports(algorithm: Algorithm, shape: &Shape) -> bool {
    if !shape.is_valid() {
        return false;
    }
    match algorithm {
        Algorithm::Direct => true,
        Algorithm::Ring | Algorithm::Tree | Algorithm::DoubleTree => {
            shape.is_all_reduce()
                || matches!(
                    shape.collective,
                    Collective::AllGather | Collective::ReduceScatter | Collective::Broadcast | Collective::Reduce
                )
        }
        Algorithm::HalvingDoubling => {
            shape.is_all_reduce() || matches!(shape.collective, Collective::AllGather | Collective::ReduceScatter)
        }
        Algorithm::RecursiveDoubling => shape.is_all_reduce(),
        Algorithm::AllPairs => {
            matches!(shape.collective, Collective::AllReduce | Collective::Reduce | Collective::Barrier)
        }
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => false,
    }
}

/// Returns true if the algorithms over the shared region (one-shot, two-shot, staged) support this collective.
pub fn through_memory(collective: Collective) -> bool {
    match collective {
        Collective::AllReduce
        | Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Gather
        | Collective::Scatter
        | Collective::AllToAll
        | Collective::Barrier => true,
        Collective::SendRecv | Collective::Scan => false,
    }
}

/// Returns true if every result is `((x0 op x1) op x2) op ...` in rank order. All algorithms for which this is true
/// give the same bits. Also true if nothing is reduced. The verifier proves it:
/// [`Report::rank_order`](crate::schedule::verify::Report).
pub fn keeps_rank_order(algorithm: Algorithm, shape: &Shape) -> bool {
    // Two values commute, so they have only one order.
    !shape.collective.reduces()
        || shape.ranks <= 2
        || matches!(
            algorithm,
            Algorithm::Direct | Algorithm::AllPairs | Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged
        )
}

/// The program of `rank`, or `None` when `algorithm` cannot do this collective on this many ranks.
pub fn program(algorithm: Algorithm, shape: &Shape, rank: usize) -> Option<Program> {
    if rank >= shape.ranks || !supports(algorithm, shape) {
        return None;
    }
    if shape.ranks == 1 {
        return Some(alone());
    }
    match algorithm {
        Algorithm::Ring => ring::program(shape, rank, ring::Ways::Both),
        Algorithm::Tree => tree::program(shape, rank),
        Algorithm::DoubleTree => double_tree::program(shape, rank),
        Algorithm::Direct => direct::program(shape, rank, false),
        Algorithm::HalvingDoubling => halving_doubling::program(shape, rank),
        Algorithm::AllPairs => all_pairs::program(shape, rank, false),
        Algorithm::RecursiveDoubling => Some(recursive_doubling::program(shape, rank)),
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => None,
    }
}

/// [`program`] for ranks whose links lead to a switch, as GPUs' do: all channels of a ring go round in the same
/// direction.
pub fn program_by_switch(algorithm: Algorithm, shape: &Shape, rank: usize) -> Option<Program> {
    let ring = algorithm == Algorithm::Ring && shape.ranks > 1 && rank < shape.ranks && supports(algorithm, shape);
    if ring { ring::program(shape, rank, ring::Ways::One) } else { program(algorithm, shape, rank) }
}

/// [`program`] without partial sums: [`Program::pairwise`] has none on any rank. `None` too where `algorithm` passes
/// partial sums on; those that [keep rank order](keeps_rank_order) do not, and the bytes they send are the same.
pub fn program_at_once(algorithm: Algorithm, shape: &Shape, rank: usize) -> Option<Program> {
    match algorithm {
        _ if !shape.combines() || shape.ranks == 1 => program(algorithm, shape, rank),
        _ if rank >= shape.ranks || !supports(algorithm, shape) => None,
        Algorithm::Direct => direct::program(shape, rank, true),
        Algorithm::AllPairs => all_pairs::program(shape, rank, true),
        _ => None,
    }
}

/// [`Program::parts`] and [`Program::span`] of the programs, without making one; `None` where [`program`] is.
pub fn cut(algorithm: Algorithm, shape: &Shape) -> Option<(usize, usize)> {
    if !supports(algorithm, shape) {
        return None;
    }
    Some(match algorithm {
        _ if shape.ranks == 1 => (1, 1),
        Algorithm::Ring => (ring::parts(shape), 1),
        Algorithm::Tree | Algorithm::Direct | Algorithm::RecursiveDoubling => (shape.channels, 1),
        Algorithm::DoubleTree => (double_tree::channels(shape), 1),
        Algorithm::HalvingDoubling => halving_doubling::cut(shape, halving_doubling::MAX_SPAN),
        Algorithm::AllPairs => (all_pairs::parts(shape), 1),
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => return None,
    })
}

/// Payload bytes that `rank` sends in a call cut by `partition`; `None` where [`program`] is.
pub fn bytes_sent(algorithm: Algorithm, shape: &Shape, rank: usize, partition: &Partition) -> Option<u64> {
    if rank >= shape.ranks || !supports(algorithm, shape) {
        return None;
    }
    if shape.ranks == 1 {
        return Some(0);
    }
    Some(match algorithm {
        Algorithm::Ring => ring::bytes_sent(shape, rank, partition),
        Algorithm::Tree => tree::bytes_sent(shape, rank, partition),
        Algorithm::DoubleTree => double_tree::bytes_sent(shape, rank, partition),
        Algorithm::Direct => direct::bytes_sent(shape, rank, partition),
        Algorithm::HalvingDoubling => halving_doubling::bytes_sent(shape, rank, partition),
        Algorithm::AllPairs => all_pairs::bytes_sent(shape, rank, partition),
        Algorithm::RecursiveDoubling => recursive_doubling::bytes_sent(shape, rank, partition),
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => return None,
    })
}

/// One rank: every collective is a copy.
fn alone() -> Program {
    let copy = Step::Copy { src: Loc::input(0, 0), dst: Loc::output(0, 0) };
    Program { parts: 1, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps: vec![copy] }] }
}

#[cfg(test)]
mod tests;
