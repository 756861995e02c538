//! Direct: every rank exchanges with every other rank (or with the root). One hop.
//!
//! ```text
//!     0 <---> 1        all_reduce: each sends its whole input to each other, and each adds all of them
//!     ^ \   / ^        in rank order: ((x0 + x1) + x2) + x3
//!     |   X   |
//!     v /   \ v        all_to_all: in round k, rank r sends to r+k and receives from r-k,
//!     2 <---> 3        so that ranks do not all send to the same one
//! ```
//! Lowest latency; all_reduce does (n-1) times the arithmetic of a ring, so it is for small messages. Every sum is
//! taken in rank order (`rank_order.rs`), so every rank gets the same bits.
//!
//! | collective | hops | bytes sent per rank (S: bytes of a segment) |
//! |---|---|---|
//! | all_reduce, barrier, all_gather, reduce_scatter, all_to_all | 1 | (n-1) · S |
//! | broadcast, scatter | 1 | (n-1) · S by the root |
//! | reduce, gather | 1 | S by all but the root |
//! | scan | 1 | (n-1-r) · S by rank r |
//!
//! Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
//! (2005), section 4 (all_to_all); NCCL's `ncclSend`/`ncclRecv` all_to_all; one-shot all_reduce of TensorRT-LLM and
//! MSCCL++.

use super::Shape;
use super::rank_order::{needs_scratch, reduce, reduce_at_once};
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::Collective;

/// The program of `rank` among two or more; `at_once`: no partial sum is stored.
pub(super) fn program(shape: &Shape, rank: usize, at_once: bool) -> Option<Program> {
    let lanes = (0..shape.channels)
        .map(|c| Some(Lane { channel: c as u32, steps: steps(shape, rank, c, at_once)? }))
        .collect::<Option<Vec<_>>>()?;
    let reduces = match shape.collective {
        Collective::AllReduce | Collective::Barrier | Collective::ReduceScatter | Collective::Scan => true,
        Collective::Reduce => rank == shape.root,
        _ => false,
    };
    let scratch_segments = if reduces { scratch(shape, rank, at_once) } else { 0 };
    Some(Program { parts: shape.channels, span: 1, scratch_segments, lanes })
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    let is_root = rank == shape.root;
    let copies = match shape.collective {
        Collective::Broadcast | Collective::Scatter => (shape.ranks - 1) * usize::from(is_root),
        Collective::Reduce | Collective::Gather => usize::from(!is_root),
        Collective::Scan => shape.ranks - 1 - rank,
        _ => shape.ranks - 1,
    };
    copies as u64 * partition.total_bytes(0..shape.channels)
}

/// Segments of scratch memory for a reduction.
fn scratch(shape: &Shape, rank: usize, at_once: bool) -> usize {
    match shape.collective {
        _ if !at_once => usize::from(needs_scratch(rank)),
        Collective::Scan => rank,
        _ => shape.ranks - 1,
    }
}

fn steps(shape: &Shape, rank: usize, c: usize, at_once: bool) -> Option<Vec<Step>> {
    let reduce = if at_once { reduce_at_once } else { reduce };
    let (n, root) = (shape.ranks, shape.root);
    // Round k: targets r+1, r+2, ..., sources r-1, r-2, ....
    let targets = (1..n).map(|k| (rank + k) % n);
    let sources = (1..n).map(|k| (rank + n - k) % n);
    let input = |segment| Loc::input(segment, c);
    let output = |segment| Loc::output(segment, c);
    let mut steps = vec![];
    match shape.collective {
        Collective::AllReduce | Collective::Barrier => {
            steps.extend(targets.map(|to| Step::send(to, input(0))));
            steps.extend(reduce(n, rank, input(0), output(0), Loc::scratch(0, c)));
        }
        Collective::ReduceScatter => {
            steps.extend(targets.map(|to| Step::send(to, input(to))));
            steps.extend(reduce(n, rank, input(rank), output(0), Loc::scratch(0, c)));
        }
        Collective::AllGather => {
            steps.extend(targets.map(|to| Step::send(to, input(0))));
            steps.push(Step::Copy { src: input(0), dst: output(rank) });
            steps.extend(sources.map(|from| Step::recv(from, output(from))));
        }
        Collective::AllToAll => {
            steps.extend(targets.map(|to| Step::send(to, input(to))));
            steps.push(Step::Copy { src: input(rank), dst: output(rank) });
            steps.extend(sources.map(|from| Step::recv(from, output(from))));
        }
        Collective::Broadcast | Collective::Scatter => {
            let segment = |to| if shape.collective == Collective::Scatter { to } else { 0 };
            if rank == root {
                steps.extend(targets.map(|to| Step::send(to, input(segment(to)))));
                steps.push(Step::Copy { src: input(segment(rank)), dst: output(0) });
            } else {
                steps.push(Step::recv(root, output(0)));
            }
        }
        Collective::Reduce | Collective::Gather if rank != root => steps.push(Step::send(root, input(0))),
        Collective::Reduce => {
            steps.extend(reduce(n, rank, input(0), output(0), Loc::scratch(0, c)));
        }
        Collective::Gather => {
            steps.push(Step::Copy { src: input(0), dst: output(rank) });
            steps.extend(targets.map(|from| Step::recv(from, output(from))));
        }
        Collective::Scan => {
            steps.extend((rank + 1..n).map(|to| Step::send(to, input(0))));
            if rank == 0 {
                steps.push(Step::Copy { src: input(0), dst: output(0) });
            } else {
                steps.extend(reduce(rank + 1, rank, input(0), output(0), Loc::scratch(0, c)));
            }
        }
        Collective::SendRecv => return None,
    }
    Some(steps)
}
