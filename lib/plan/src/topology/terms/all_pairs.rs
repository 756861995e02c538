//! The terms of reducing one part each.

use super::{Load, Work, direct, rank_order_copies};
use crate::algorithm::Shape;
use crate::topology::placement::{Crossing, Placement};

/// Every window in n parts; each rank combines one.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let others = n - 1.0;
    let reduced = others / n;
    let copies = |rank: usize| rank_order_copies(shape.ranks, rank, shape.is_all_reduce() || rank == shape.root) / n;
    let copied = (0..shape.ranks.min(3)).chain([shape.ranks - 1]).map(copies).fold(0.0, f64::max);
    // The ranks from the third on, and the last one again if it copies twice.
    let mean_copied = ((n - 2.0) / n + copies(shape.ranks - 1) - rank_order_copies(3, shape.ranks - 1, false) / n) / n;
    if shape.is_all_reduce() {
        let mut work = Work::symmetric(2.0, Load::hops(2.0 * others, 2.0 * others / n).reducing(reduced));
        (work.busiest.copied, work.mean.copied) = (copied, mean_copied);
        return work;
    }
    // All ranks exchange parts; then the root receives a finished one from each.
    let messages = 2.0 * others + 2.0 * others / n;
    Work {
        path: Load::hops(2.0, others / n + 0.5).reducing(reduced),
        busiest: Load::ends(3.0 * others, 3.0 * others / n).reducing(reduced).copying(copied),
        mean: Load::ends(messages, messages / n).reducing(reduced).copying(mean_copied),
    }
}

/// All ranks exchange with all, as in direct exchange without a root.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let all_to_all = Shape { collective: crate::wire::Collective::AllReduce, ..*shape };
    direct::crossing(&all_to_all, placement)
}
