//! The ring's terms.

use super::{Load, Work, edges};
use crate::algorithm::Shape;
use crate::topology::placement::{Crossing, Placement, Share};
use crate::wire::Collective;

/// Twice round with 1/n of a segment per message; once round with whole segments; or a chain.
pub(super) fn work(shape: &Shape) -> Work {
    let n = shape.ranks as f64;
    let around = n - 1.0;
    match shape.collective {
        _ if shape.is_all_reduce() => {
            let hops = 2.0 * around;
            Work::symmetric(hops, Load::hops(hops, hops / n).reducing(around / n))
        }
        Collective::Broadcast | Collective::Reduce => {
            // The root of a broadcast also copies its input to its output.
            let copied = f64::from(u8::from(shape.collective == Collective::Broadcast));
            let ends = around.min(2.0);
            Work {
                path: Load::hops(around, around).reducing(around),
                busiest: Load::ends(ends, ends).reducing(1.0).copying(copied),
                mean: edges(n).copying(copied / n),
            }
        }
        collective => {
            let copied = f64::from(u8::from(collective == Collective::AllGather));
            Work::symmetric(around, Load::hops(around, around).reducing(around).copying(copied))
        }
    }
}

/// One lap of the ring crosses every host border once.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let (n, hosts) = (shape.ranks as f64, placement.hosts(shape.ranks) as f64);
    let chain = matches!(shape.collective, Collective::Broadcast | Collective::Reduce);
    // A chain has no edge into its first rank; a ring has one there.
    let first = match shape.collective {
        Collective::Reduce => (shape.root + 1) % shape.ranks,
        _ => shape.root,
    };
    let borders = if chain && first.is_multiple_of(placement.block()) { hosts - 1.0 } else { hosts };
    let path = Share::of(borders / (n - 1.0));
    // A rank at a border has one neighbour on another host; a rank alone on its host has two.
    let alone = placement.block_of(shape.ranks - 1, shape.ranks) == 1;
    let busiest = Share::of(if alone { 1.0 } else { 0.5 });
    let mean = Share::of(if chain { borders / (n - 1.0) } else { hosts / n });
    Crossing { path, busiest, mean }
}
