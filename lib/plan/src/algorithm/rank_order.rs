//! Reduction in rank order: `((x0 + x1) + x2) + ...`, on every rank.
//!
//! The fixed order makes floating-point results independent of the algorithm, of the computing rank and of timing.
//! Every operator gives the same bits for `a + b` and `b + a`, so a rank may put its own value on either side.

use crate::schedule::{Loc, Step};

/// The steps by which `rank` reduces its own `input` and one message of each other rank into `output`.
///
/// `output` may be the same memory as `input`, or as `tmp`. `tmp` is used if [`needs_scratch`] says so.
pub(super) fn reduce(n: usize, rank: usize, input: Loc, output: Loc, tmp: Loc) -> Vec<Step> {
    let mut steps = Vec::with_capacity(n + 1);
    // The sum so far, and the rank whose value comes next.
    let (mut sum, mut next) = match rank {
        0 => (input, 1),
        1 => {
            steps.push(Step::recv_reduce_copy(0, input, output, n == 2));
            (output, 2)
        }
        _ => {
            // The sum of the ranks before us waits in scratch memory: the output may be where our input still is.
            steps.push(Step::recv(0, tmp));
            steps.extend((1..rank).map(|from| Step::recv_reduce_copy(from, tmp, tmp, false)));
            if rank + 1 == n && output != tmp {
                // x + (x0 + ...): no copy when in place.
                steps.push(Step::Copy { src: input, dst: output });
                steps.push(Step::Reduce { src: tmp, dst: output, last: true });
            } else {
                steps.push(Step::Reduce { src: input, dst: tmp, last: rank + 1 == n });
            }
            (tmp, rank + 1)
        }
    };
    while next < n {
        steps.push(Step::recv_reduce_copy(next, sum, output, next + 1 == n));
        sum = output;
        next += 1;
    }
    steps
}

/// As [`reduce`] with all operands received before the first is added ([`AtOnce`](crate::schedule::AtOnce)). Rank `r`'s
/// message waits in a segment of scratch memory, `tmp` in segment `r`, or in the one before it behind our own rank.
pub(super) fn reduce_at_once(n: usize, rank: usize, input: Loc, output: Loc, tmp: Loc) -> Vec<Step> {
    let segment = |from: usize| Loc { segment: (from - usize::from(from > rank)) as u32, ..tmp };
    // In the order in which the first messages come.
    let sources = (1..n).map(|k| (rank + n - k) % n);
    let mut steps: Vec<Step> = sources.map(|from| Step::recv(from, segment(from))).collect();
    let sum = segment(usize::from(rank == 0));
    let operands = (0..n).map(|from| if from == rank { input } else { segment(from) });
    let mut operands = operands.filter(|&src| src != sum).peekable();
    while let Some(src) = operands.next() {
        steps.push(Step::Reduce { src, dst: sum, last: operands.peek().is_none() });
    }
    if output != sum {
        steps.push(Step::Copy { src: sum, dst: output });
    }
    steps
}

/// Returns true if [`reduce`] uses scratch memory on `rank`.
pub(super) fn needs_scratch(rank: usize) -> bool {
    rank >= 2
}
