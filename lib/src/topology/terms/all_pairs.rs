//! The terms of reducing one part each.

use super::{Load, Work, direct, is_all_reduce};
use crate::algorithm::Shape;
use crate::topology::placement::{Crossing, Placement};

/// Every window in n parts; each rank combines one.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    let reduced = others / n;
    // From the third rank on, all but the first one begin their part by copying the first rank's.
    let (copied, mean_copied) = if shape.ranks > 2 { (1.0 / n, others / (n * n)) } else { (0.0, 0.0) };
    if is_all_reduce(shape) {
        let mut work = Work::symmetric(2.0, Load::hops(2.0 * others, 2.0 * others / n).reducing(reduced));
        (work.busiest.copied, work.mean.copied) = (copied, mean_copied);
        return work;
    }
    // Everybody swaps parts; then the root takes a finished one from each.
    let messages = 2.0 * others + 2.0 * others / n;
    Work {
        path: Load::hops(2.0, others / n + 0.5).reducing(reduced),
        busiest: Load::ends(3.0 * others, 3.0 * others / n).reducing(reduced),
        mean: Load::ends(messages, messages / n).reducing(reduced),
    }
}

/// Everybody talks to everybody, as in direct exchange without a root.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let all_to_all = Shape { collective: crate::wire::Collective::AllReduce, ..*shape };
    direct::crossing(&all_to_all, placement)
}
