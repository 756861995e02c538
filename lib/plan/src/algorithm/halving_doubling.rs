//! Halving-doubling: reduce-scatter by recursive halving, all-gather by recursive doubling, over a hypercube.
//!
//! all_reduce on 4 ranks; each box is the parts a rank holds a partial sum of:
//! ```text
//!            rank 0     rank 1     rank 2     rank 3
//!            0 1 2 3    0 1 2 3    0 1 2 3    0 1 2 3
//! halving    0 1  <----------------> 2 3                 distance 2: send the other half, add to ours
//!                       0 1  <----------------> 2 3
//!            0   <---->   1          2   <---->   3      distance 1: part r is finished on rank r
//! doubling   0 1 <---->  0 1        2 3  <---->  2 3     distance 1: swap what is finished
//!            0 1 2 3    0 1 2 3    0 1 2 3    0 1 2 3    distance 2
//! ```
//! A message carries the parts of a whole block ([`Program::span`]), so an exchange is one message each way. When n is
//! not a power of two, with 2^k below it, the first 2(n - 2^k) ranks pair up: the odd one sends its input to the even
//! one, does not take part, and gets the result at the end.
//!
//! | collective | hops | bytes sent per rank (S: bytes of a segment) |
//! |---|---|---|
//! | all_reduce, barrier | 2log₂n; other n: 2k + 2 | 2(n-1)/n · S; other n: up to S more |
//! | reduce_scatter | log₂n; n-1 messages | (n-1) · S |
//! | all_gather | log₂n; n-1 messages | (n-1) · S; other n: see `cube_segments.rs` |
//!
//! Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
//! (2005), section 4.5; gloo `allreduce_halving_doubling.h`.

use std::ops::Range;

use super::hypercube::{Cube, Role, block, exchange};
use super::{Shape, cube_segments};
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::Collective;

/// Most parts in a message. A part may be a single element, so this bounds the smallest possible message:
/// 512 elements of 8 bytes are 4 KiB, the smallest message size that can be configured.
pub const MAX_SPAN: usize = 512;

/// The program of `rank` among two or more.
pub(super) fn program(shape: &Shape, rank: usize) -> Option<Program> {
    program_with_span(shape, rank, MAX_SPAN)
}

/// As [`program`] with another limit on the parts per message.
pub(super) fn program_with_span(shape: &Shape, rank: usize, max_span: usize) -> Option<Program> {
    let blocks = Blocks::new(shape.ranks, rank, max_span);
    let lanes = (0..shape.channels).map(|c| {
        let steps = match shape.collective {
            Collective::AllReduce | Collective::Barrier => blocks.all_reduce(c),
            Collective::ReduceScatter => cube_segments::reduce_scatter(&blocks.cube, rank, c),
            Collective::AllGather => cube_segments::all_gather(&blocks.cube, rank, c),
            _ => return None,
        };
        Some(Lane { channel: c as u32, steps })
    });
    let lanes = lanes.collect::<Option<Vec<_>>>()?;
    let (parts, span) = cut(shape, max_span);
    let scratch_segments = match shape.collective {
        Collective::ReduceScatter => cube_segments::scratch_segments(&blocks.cube),
        _ => 0,
    };
    Some(Program { parts, span, scratch_segments, lanes })
}

/// Parts per window, and most of them in one message.
pub(super) fn cut(shape: &Shape, max_span: usize) -> (usize, usize) {
    let Blocks { cube, span } = Blocks::new(shape.ranks, 0, max_span);
    if shape.is_all_reduce() { (cube.size * shape.channels, span) } else { (shape.channels, 1) }
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    if !shape.is_all_reduce() {
        return cube_segments::segments_sent(shape, rank) * partition.total_bytes(0..shape.channels);
    }
    let cube = Cube::new(shape.ranks, rank);
    let channel = |c| {
        let base = c * cube.size;
        let bytes = |parts: Range<usize>| partition.total_bytes(base + parts.start..base + parts.end);
        let all = bytes(0..cube.size);
        match cube.role {
            Role::Out { .. } => all,
            Role::In { id, partner } => {
                // Halving sends all parts except the one that we finish; doubling sends ever larger blocks around it.
                let halving = all - bytes(id..id + 1);
                let doubling: u64 = cube.distances().map(|d| bytes(block(id, d))).sum();
                halving + doubling + if partner.is_some() { all } else { 0 }
            }
        }
    };
    (0..shape.channels).map(channel).sum()
}

/// A hypercube whose messages are cut.
struct Blocks {
    cube: Cube,
    /// Most parts per message.
    span: usize,
}

impl Blocks {
    fn new(ranks: usize, rank: usize, max_span: usize) -> Blocks {
        let cube = Cube::new(ranks, rank);
        Blocks { span: (cube.size / 2).clamp(1, max_span), cube }
    }

    /// A range of parts of channel `c`, cut into messages.
    fn messages(&self, c: usize, parts: Range<usize>, at: Loc) -> impl Iterator<Item = Loc> + use<> {
        let (base, span) = (c * self.cube.size, self.span);
        parts
            .clone()
            .step_by(span)
            .map(move |first| Loc { part: (base + first) as u32, ..at }.spanning(span.min(parts.end - first)))
    }

    fn all_reduce(&self, c: usize) -> Vec<Step> {
        let (input, output) = (Loc::input(0, 0), Loc::output(0, 0));
        let messages = |parts, at| self.messages(c, parts, at);
        let mut steps = vec![];
        let (id, partner) = match self.cube.role {
            Role::In { id, partner } => (id, partner),
            Role::Out { partner } => {
                steps.extend(messages(0..self.cube.size, input).map(|src| Step::send(partner, src)));
                steps.extend(messages(0..self.cube.size, output).map(|dst| Step::recv(partner, dst)));
                return steps;
            }
        };
        let mut sum = input;
        if let Some(from) = partner {
            let both = messages(0..self.cube.size, input).zip(messages(0..self.cube.size, output));
            steps.extend(both.map(|(src, dst)| Step::recv_reduce_copy(from, src, dst, false)));
            sum = output;
        }
        for d in self.cube.distances().rev() {
            let peer = self.cube.rank(id ^ d);
            let (mine, theirs) = (block(id, d), block(id ^ d, d));
            let sends = messages(theirs.clone(), sum).map(|src| Step::send(peer, src));
            let both = messages(mine.clone(), sum).zip(messages(mine, output));
            if d == 1 {
                // The finished part is sent straight back: the last halving is the first doubling.
                steps.extend(sends);
                steps.extend(both.map(|(src, dst)| Step::recv_reduce_copy_send(peer, peer, src, dst, true)));
                steps.extend(messages(theirs, output).map(|dst| Step::recv(peer, dst)));
            } else {
                exchange(&mut steps, sends, both.map(|(src, dst)| Step::recv_reduce_copy(peer, src, dst, false)));
            }
            sum = output;
        }
        for d in self.cube.distances().skip(1) {
            let peer = self.cube.rank(id ^ d);
            let sends = messages(block(id, d), output).map(|src| Step::send(peer, src));
            exchange(&mut steps, sends, messages(block(id ^ d, d), output).map(|dst| Step::recv(peer, dst)));
        }
        if let Some(to) = partner {
            steps.extend(messages(0..self.cube.size, output).map(|src| Step::send(to, src)));
        }
        steps
    }
}
