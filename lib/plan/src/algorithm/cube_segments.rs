//! Segments over a hypercube: all_gather by recursive doubling, reduce_scatter by recursive halving, for any number of
//! ranks.
//!
//! all_gather on 5 ranks: 0 and 1 are a pair, of which 0 is in the cube of 0, 2, 3, 4. Each box lists a rank's
//! segments:
//! ```text
//!            rank 1   rank 0        rank 2        rank 3        rank 4
//! the pair     1 ----> 0 1             2             3             4
//! distance 1  01 <--- 0 1  <------>   2              3  <------>   4
//! distance 2  012 <-- 0 1 2 <-------------------->  3 4
//!                                 0 1 2  <-------------------->   3 4
//!           01234 <-- 0 1 2 3 4     0 1 2 3 4     0 1 2 3 4     0 1 2 3 4
//! ```
//! The even rank of a pair forwards received segments to the odd one as they arrive. reduce_scatter is the same in
//! reverse: the odd rank sends its input except its own segment, which it adds itself to the others' sum.
//!
//! Segments are not contiguous in memory, so each is a message. The first two messages of an exchange follow each other
//! directly. Over TCP they travel together, so a call on 4 ranks takes log₂n = 2 trips.
//!
//! | collective | messages received per rank | bytes sent per rank (S: bytes of a segment) |
//! |---|---|---|
//! | reduce_scatter | n-1; other n: up to 3(n-1) in a pair | (n-1) · S |
//! | all_gather | n-1 | (n-1) · S; other n: up to 3(n-1) · S in a pair, whose odd rank sends S |
//!
//! Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
//! (2005), sections 4.1, 4.2 and 4.5, where all_reduce folds other n so.

use super::Shape;
use super::hypercube::{Cube, Role, block, exchange};
use crate::schedule::{Loc, Step};
use crate::wire::Collective;

/// Segments that `rank` sends.
pub(super) fn segments_sent(shape: &Shape, rank: usize) -> u64 {
    let cube = Cube::new(shape.ranks, rank);
    let others = shape.ranks - 1;
    let segments = match cube.role {
        _ if shape.collective == Collective::ReduceScatter => others,
        Role::Out { .. } => 1,
        Role::In { id, partner } => {
            let doubling: usize = cube.distances().map(|d| cube.segments(block(id, d)).len()).sum();
            doubling + if partner.is_some() { others } else { 0 }
        }
    };
    segments as u64
}

/// Sums for a rank's half; two ranks alone add in place.
pub(super) fn scratch_segments(cube: &Cube) -> usize {
    match cube.role {
        Role::In { id, partner } if cube.size > 2 || partner.is_some() => cube.segments(block(id, cube.size / 2)).len(),
        _ => 0,
    }
}

pub(super) fn reduce_scatter(cube: &Cube, rank: usize, c: usize) -> Vec<Step> {
    let half = cube.size / 2;
    let (input, output) = (|s: usize| Loc::input(s, c), Loc::output(0, c));
    let (id, partner) = match cube.role {
        Role::In { id, partner } => (id, partner),
        Role::Out { partner } => {
            // The half that the partner keeps, then the half that it forwards.
            let kept = block(partner / 2, half);
            let order = cube.segments(kept.clone()).chain(cube.segments(block(kept.start ^ half, half)));
            let mut steps: Vec<Step> = order.filter(|&s| s != rank).map(|s| Step::send(partner, input(s))).collect();
            steps.push(Step::recv_reduce_copy(partner, input(rank), output, true));
            return steps;
        }
    };
    let kept = cube.segments(block(id, half));
    let scratch = |s: usize| Loc::scratch(s - kept.start, c);
    // An odd rank adds its own part of its own segment itself, at the end.
    let handed_over = |s: usize| partner.is_some() && Some(s) != partner;
    let mut steps = vec![];
    if let Some(odd) = partner {
        steps.extend(
            kept.clone().filter(|&s| handed_over(s)).map(|s| Step::recv_reduce_copy(odd, input(s), scratch(s), false)),
        );
    }
    for d in cube.distances().rev() {
        let first = d == half;
        let peer = cube.rank(id ^ d);
        // Sums are in scratch memory from the first addition on, and in the output after the last.
        let sum = |s: usize| if first && !handed_over(s) { input(s) } else { scratch(s) };
        let sends = cube.segments(block(id ^ d, d)).map(|s| match partner {
            Some(odd) if first => Step::recv_reduce_send(odd, peer, input(s)),
            _ => Step::send(peer, sum(s)),
        });
        let recvs = cube.segments(block(id, d)).map(|s| match partner {
            Some(odd) if d == 1 && s == odd => Step::recv_reduce_send(peer, odd, sum(s)),
            _ if d == 1 => Step::recv_reduce_copy(peer, sum(s), output, true),
            _ => Step::recv_reduce_copy(peer, sum(s), scratch(s), false),
        });
        exchange(&mut steps, sends, recvs);
    }
    steps
}

pub(super) fn all_gather(cube: &Cube, rank: usize, c: usize) -> Vec<Step> {
    let (own, output) = (Loc::input(0, c), |s: usize| Loc::output(s, c));
    let copy = Step::Copy { src: own, dst: output(rank) };
    let arriving = |id: usize, d: usize| cube.segments(block(id ^ d, d));
    let (id, partner) = match cube.role {
        Role::In { id, partner } => (id, partner),
        Role::Out { partner } => {
            let order = std::iter::once(partner).chain(cube.distances().flat_map(|d| arriving(partner / 2, d)));
            let recvs = order.map(|s| Step::recv(partner, output(s)));
            return [Step::send(partner, own), copy].into_iter().chain(recvs).collect();
        }
    };
    let mut steps: Vec<Step> = partner.map(|odd| Step::send(odd, own)).into_iter().collect();
    for d in cube.distances() {
        let peer = cube.rank(id ^ d);
        let sends = cube.segments(block(id, d)).map(|s| match partner {
            _ if s == rank => Step::send(peer, own),
            Some(odd) if d == 1 => Step::recv_copy_send(odd, peer, output(s)),
            _ => Step::send(peer, output(s)),
        });
        let recvs = arriving(id, d).map(|s| match partner {
            Some(odd) => Step::recv_copy_send(peer, odd, output(s)),
            None => Step::recv(peer, output(s)),
        });
        exchange(&mut steps, sends, recvs);
    }
    steps.push(copy);
    steps
}
