//! Recursive doubling: neighbours in a hypercube exchange all their data, at twice the distance each time.
//!
//! all_reduce on 4 ranks; each box lists the ranks whose inputs have been added:
//! ```text
//!            rank 0     rank 1     rank 2     rank 3
//!               0          1          2          3
//! distance 1   01 <---->  01         23 <---->  23
//! distance 2  0123 <----------------> 0123                 the same for ranks 1 and 3
//! ```
//! Both ends of an exchange add the same two sums, so every rank gets the same bits. A rank sends its whole segment
//! log₂n times: fewer messages than any other algorithm with so few hops, but more bytes than algorithms that cut the
//! segment. So it is for short messages.
//!
//! | collective | hops | bytes sent per rank (S: bytes of the segment) |
//! |---|---|---|
//! | all_reduce, barrier | log₂n; other n, with 2^k below: k + 1, above 1.5 · 2^k k + 2 | log₂n · S; other n: up to (k + 1) · S |
//!
//! Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
//! (2005), section 4.5.

use super::Shape;
use super::hypercube::{Cube, Role};
use crate::schedule::{Lane, Loc, Partition, Program, Step};

/// The program of `rank` among two or more.
pub(super) fn program(shape: &Shape, rank: usize) -> Program {
    let cube = Cube::new(shape.ranks, rank);
    let lanes = (0..shape.channels).map(|c| Lane { channel: c as u32, steps: steps(&cube, c) }).collect();
    Program { parts: shape.channels, span: 1, scratch_segments: 0, lanes }
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    let cube = Cube::new(shape.ranks, rank);
    let times = match cube.role {
        Role::Out { .. } => 1,
        Role::In { partner, .. } => cube.size.ilog2() + u32::from(partner.is_some()),
    };
    u64::from(times) * partition.total_bytes(0..shape.channels)
}

fn steps(cube: &Cube, c: usize) -> Vec<Step> {
    let (input, output) = (Loc::input(0, c), Loc::output(0, c));
    let (id, partner) = match cube.role {
        Role::In { id, partner } => (id, partner),
        Role::Out { partner } => return vec![Step::send(partner, input), Step::recv(partner, output)],
    };
    let mut steps = vec![];
    let mut sum = input;
    if let Some(from) = partner {
        steps.push(Step::recv_reduce_copy(from, input, output, false));
        sum = output;
    }
    for d in cube.distances() {
        let peer = cube.rank(id ^ d);
        steps.push(Step::send(peer, sum));
        steps.push(Step::recv_reduce_copy(peer, sum, output, 2 * d == cube.size));
        sum = output;
    }
    steps.extend(partner.map(|to| Step::send(to, output)));
    steps
}
