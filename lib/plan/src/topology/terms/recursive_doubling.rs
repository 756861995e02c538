//! The terms of swapping whole segments over a hypercube.

use super::{Load, Work};
use crate::algorithm::Shape;
use crate::topology::placement::{Crossing, Placement, Share};

/// log₂n exchanges of a whole segment each way.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let bits = f64::from(shape.ranks.ilog2());
    let size = bits.exp2();
    let inside = Load::hops(bits, bits).reducing(bits);
    if size == n {
        return Work::symmetric(bits, inside);
    }
    // The folded ranks' data arrives, and the result is sent: one after the other if such ranks are at opposite
    // corners.
    let extra = n - size;
    let hops = bits + if 2.0 * extra > size { 2.0 } else { 1.0 };
    Work {
        path: Load::hops(hops, hops).reducing(bits + 1.0),
        busiest: Load::hops(bits + 1.0, bits + 1.0).reducing(bits + 1.0),
        mean: Load::hops((size * bits + 2.0 * extra) / n, (size * bits + 2.0 * extra) / n)
            .reducing((size * bits + extra) / n),
    }
}

/// An exchange at distance d stays on the host if blocks are aligned to 2d.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let bits = shape.ranks.ilog2();
    // Folding puts two ranks under one id, for the ids that it concerns: their distances double.
    let stretch = if shape.ranks.is_power_of_two() { 1 } else { 2 };
    let block = placement.block();
    // Of the pairs at distance d: the slowest of them (path), and how many of them there are (mean).
    let slowest = |d: usize| f64::from(u8::from(!block.is_multiple_of(2 * d * stretch)));
    let pairs = |d: usize| slowest(d) * ((d * stretch) as f64 / block as f64).min(1.0);
    let share = |of: &dyn Fn(usize) -> f64| Share::of((0..bits).map(|bit| of(1 << bit)).sum::<f64>() / f64::from(bits));
    Crossing { path: share(&slowest), busiest: share(&slowest), mean: share(&pairs) }
}
