//! Direct: every rank talks to every other rank (or to the root) itself. One hop.
//!
//! ```text
//!     0 <---> 1        all_reduce: each sends its whole input to each other, and each adds all of them
//!     ^ \   / ^        in rank order: ((x0 + x1) + x2) + x3
//!     |   X   |
//!     v /   \ v        all_to_all: in round k, rank r sends to r+k and receives from r-k,
//!     2 <---> 3        so that no rank is everybody's next target
//! ```
//! Lowest latency; all_reduce does (n-1) times the arithmetic of a ring, so it is for small messages. The sum is taken
//! in rank order on every rank, so every rank gets the same bits (`a + b` and `b + a` are the same).
//!
//! | collective | hops | bytes sent per rank (S: bytes of a segment) |
//! |---|---|---|
//! | all_reduce, barrier, all_gather, reduce_scatter, all_to_all | 1 | (n-1) · S |
//! | broadcast, scatter | 1 | (n-1) · S by the root |
//! | reduce, gather | 1 | S by all but the root |
//!
//! Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
//! (2005), section 4 (all_to_all); NCCL's `ncclSend`/`ncclRecv` all_to_all; one-shot all_reduce of TensorRT-LLM and MSCCL++.

use super::Shape;
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::Collective;

/// The program of `rank` among two or more.
pub(super) fn program(shape: &Shape, rank: usize) -> Option<Program> {
    let lanes = (0..shape.channels)
        .map(|c| Some(Lane { channel: c as u32, steps: steps(shape, rank, c)? }))
        .collect::<Option<Vec<_>>>()?;
    let scratch_segments = usize::from(shape.is_all_reduce() && rank >= 2);
    Some(Program { parts: shape.channels, span: 1, scratch_segments, lanes })
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    let is_root = rank == shape.root;
    let copies = match shape.collective {
        Collective::Broadcast | Collective::Scatter => (shape.ranks - 1) * usize::from(is_root),
        Collective::Reduce | Collective::Gather => usize::from(!is_root),
        _ => shape.ranks - 1,
    };
    copies as u64 * partition.total_bytes(0..shape.channels)
}

fn steps(shape: &Shape, rank: usize, c: usize) -> Option<Vec<Step>> {
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
            reduce_in_rank_order(&mut steps, n, rank, c);
        }
        Collective::ReduceScatter => {
            steps.extend(targets.map(|to| Step::send(to, input(to))));
            for (k, from) in sources.enumerate() {
                let src = if k == 0 { input(rank) } else { output(0) };
                steps.push(Step::recv_reduce_copy(from, src, output(0), k == n - 2));
            }
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
            for (k, from) in targets.enumerate() {
                let src = if k == 0 { input(0) } else { output(0) };
                steps.push(Step::recv_reduce_copy(from, src, output(0), k == n - 2));
            }
        }
        Collective::Gather => {
            steps.push(Step::Copy { src: input(0), dst: output(rank) });
            steps.extend(targets.map(|from| Step::recv(from, output(from))));
        }
        Collective::SendRecv => return None,
    }
    Some(steps)
}

/// `((x0 + x1) + x2) + ...`, where `x[rank]` is our input. The output may be the same memory as the input,
/// so the sum of the ranks before us is kept in scratch memory until our input is in it.
fn reduce_in_rank_order(steps: &mut Vec<Step>, n: usize, rank: usize, c: usize) {
    let (input, output, tmp) = (Loc::input(0, c), Loc::output(0, c), Loc::scratch(0, c));
    // The sum so far, and the rank whose value comes next.
    let (mut sum, mut next) = match rank {
        0 => (input, 1),
        1 => {
            steps.push(Step::recv_reduce_copy(0, input, output, n == 2));
            (output, 2)
        }
        _ => {
            steps.push(Step::recv(0, tmp));
            steps.extend((1..rank).map(|from| Step::recv_reduce_copy(from, tmp, tmp, false)));
            if rank + 1 == n {
                // x + (x0 + ...): the same bits as (x0 + ...) + x, and no copy when in place.
                steps.push(Step::Copy { src: input, dst: output });
                steps.push(Step::Reduce { src: tmp, dst: output, last: true });
            } else {
                steps.push(Step::Reduce { src: input, dst: tmp, last: false });
            }
            (tmp, rank + 1)
        }
    };
    while next < n {
        steps.push(Step::recv_reduce_copy(next, sum, output, next + 1 == n));
        sum = output;
        next += 1;
    }
}
