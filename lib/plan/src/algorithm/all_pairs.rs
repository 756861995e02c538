//! All pairs: each rank reduces one part of all inputs and sends the result to all ranks. Two hops.
//!
//! all_reduce on 3 ranks, one channel:
//! ```text
//!            rank 0           rank 1           rank 2
//!            p0 p1 p2         p0 p1 p2         p0 p1 p2
//! hop 1      p1 to 1,         p0 to 0,         p0 to 0,        part p goes to rank p
//!            p2 to 2          p2 to 2          p1 to 1
//!            p0 = 0+1+2       p1 = 0+1+2       p2 = 0+1+2      in rank order, see `rank_order`
//! hop 2      p0 to 1, 2       p1 to 2, 0       p2 to 0, 1      finished parts go to all ranks
//! ```
//! It has the bytes and additions of a ring, in 2 hops instead of 2(n-1). But every rank needs a link to every other
//! one, and uses all of them at once. reduce has the same first hop and sends the finished parts to the root.
//!
//! | collective | hops | bytes sent per rank (S: bytes of the segment) |
//! |---|---|---|
//! | all_reduce, barrier | 2 | 2(n-1)/n · S |
//! | reduce | 2 | S; the root (n-1)/n · S |
//!
//! Sources: MSCCL's all-pairs algorithm (A. Shah et al., "TACCL", 2023; M. Cowan et al., "MSCCLang", 2023, section 6);
//! the two-shot all_reduce of TensorRT-LLM; van de Geijn's scatter-gather scheme.

use super::Shape;
use super::rank_order::{needs_scratch, reduce, reduce_at_once};
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::Collective;

/// The program of `rank` among two or more; `at_once`: no partial sum is stored.
pub(super) fn program(shape: &Shape, rank: usize, at_once: bool) -> Option<Program> {
    let lanes =
        (0..shape.channels).map(|c| Lane { channel: c as u32, steps: steps(shape, rank, c, at_once) }).collect();
    let has_output = shape.output_segments(rank) > 0;
    let scratch_segments = if at_once { shape.ranks - 1 } else { usize::from(needs_scratch(rank) || !has_output) };
    Some(Program { parts: parts(shape), span: 1, scratch_segments, lanes })
}

/// Parts per window: one per rank and channel.
pub(super) fn parts(shape: &Shape) -> usize {
    shape.ranks * shape.channels
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    let n = shape.ranks;
    let copies = match shape.collective {
        Collective::Reduce => usize::from(rank != shape.root),
        _ => n - 1,
    };
    (0..shape.channels)
        .map(|c| {
            let own = partition.total_bytes(c * n + rank..c * n + rank + 1);
            partition.total_bytes(c * n..(c + 1) * n) - own + copies as u64 * own
        })
        .sum()
}

fn steps(shape: &Shape, rank: usize, c: usize, at_once: bool) -> Vec<Step> {
    let reduce = if at_once { reduce_at_once } else { reduce };
    let n = shape.ranks;
    // Round k: targets r+1, r+2, ..., sources r-1, r-2, ....
    let targets = (1..n).map(|k| (rank + k) % n);
    let sources = (1..n).map(|k| (rank + n - k) % n);
    let part = |owner: usize| c * n + owner;
    let (input, output) = (|owner| Loc::input(0, part(owner)), |owner| Loc::output(0, part(owner)));
    let tmp = Loc::scratch(0, part(rank));
    let mut steps: Vec<Step> = targets.clone().map(|to| Step::send(to, input(to))).collect();
    if shape.collective == Collective::Reduce && rank != shape.root {
        steps.extend(reduce(n, rank, input(rank), tmp, tmp));
        steps.push(Step::send(shape.root, tmp));
        return steps;
    }
    steps.extend(reduce(n, rank, input(rank), output(rank), tmp));
    if shape.collective != Collective::Reduce {
        steps.extend(targets.map(|to| Step::send(to, output(rank))));
    }
    steps.extend(sources.map(|from| Step::recv(from, output(from))));
    steps
}
