//! The terms of one tree and of two.

use super::{Load, Work, edges};
use crate::algorithm::{Shape, binary_tree};
use crate::topology::placement::{Crossing, Placement, Share};
use crate::wire::Collective;

/// One tree with the whole window.
pub(super) fn one(shape: &Shape) -> Work {
    if is_by_segments(shape) {
        return by_segments(shape, 1.0);
    }
    let copied = copied(shape);
    let mut work = carrying(shape, 1.0);
    work.busiest.copied = copied;
    work.mean.copied = copied / shape.ranks as f64;
    work
}

/// Two trees, each with half; an inner node of one is a leaf of the other.
pub(super) fn two(shape: &Shape) -> Work {
    if is_by_segments(shape) {
        return by_segments(shape, 0.5);
    }
    let Work { path, busiest, mean } = carrying(shape, 0.5);
    let ways = ways(shape);
    let copied = copied(shape);
    // At each hop the rank is a leaf of the other tree, too: one more end, and half a window.
    let path = path.queueing(path.messages / 2.0);
    let path = Load { bytes: path.bytes + path.messages / 4.0, ..path };
    Work {
        path,
        // Both an inner node (two halves) and the root (one half of each tree) combine a whole window.
        busiest: Load::ends((busiest.messages + ways) / 2.0, busiest.bytes + ways / 2.0).reducing(1.0).copying(copied),
        mean: Load::ends(mean.messages, 2.0 * mean.bytes)
            .reducing(2.0 * mean.reduced)
            .copying(copied / shape.ranks as f64),
    }
}

/// Up and down, or one of the two.
fn ways(shape: &Shape) -> f64 {
    if shape.is_all_reduce() { 2.0 } else { 1.0 }
}

/// The root of a broadcast copies its input to its output.
fn copied(shape: &Shape) -> f64 {
    f64::from(u8::from(shape.collective == Collective::Broadcast))
}

/// One tree that carries `share` of the window.
fn carrying(shape: &Shape, share: f64) -> Work {
    let depth = f64::from(binary_tree::depth(shape.ranks));
    // Most children, and neighbours, of any rank: 2 ranks are one edge, 3 a chain.
    let children = if shape.ranks <= 3 { 1.0 } else { 2.0 };
    let neighbours = (shape.ranks as f64 - 1.0).min(3.0);
    let ways = ways(shape);
    let mean = edges(shape.ranks as f64);
    // At each level a rank receives from one side and sends to the other.
    let path_bytes = ways * depth * (1.0 + children) * share;
    Work {
        path: Load::ends(2.0 * ways * depth, path_bytes).reducing(depth * children * share),
        busiest: Load::ends(ways * neighbours, ways * neighbours * share).reducing(children * share),
        mean: Load::ends(ways * mean.messages, ways * mean.bytes * share).reducing(mean.reduced * share),
    }
}

fn is_by_segments(shape: &Shape) -> bool {
    matches!(shape.collective, Collective::AllGather | Collective::ReduceScatter)
}

/// all_gather and reduce_scatter: each of n segments crosses each edge once. `share` of the window per tree: one tree
/// or two. Forwarded segments arrive one by one, so none is assumed to travel with another.
fn by_segments(shape: &Shape, share: f64) -> Work {
    let n = shape.ranks as f64;
    let neighbours = (n - 1.0).min(3.0);
    // The rest of the window is in another tree, where this rank is a leaf with one edge.
    let ends = n * (share * neighbours + (1.0 - share));
    let copied = f64::from(u8::from(shape.collective == Collective::AllGather));
    let busiest = Load::ends(ends, ends).reducing(1.0 + share * n * (neighbours - 1.0)).copying(copied);
    let all = 2.0 * (n - 1.0);
    // Up to the child of the root, and down again; the segments follow each other, as many as the busiest rank takes.
    let messages = 2.0 * (2.0 * f64::from(binary_tree::depth(shape.ranks)) - 2.0).max(1.0);
    let path = Load { messages, copied: 0.0, ..busiest };
    Work {
        path: if share < 1.0 { path.queueing(messages / 2.0) } else { path },
        busiest,
        mean: Load::ends(all, all).reducing(n - 1.0).copying(copied),
    }
}

/// The first ranks of the blocks are a tree of the same shape among themselves, and half of the blocks have a second
/// edge out.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let hosts = placement.hosts(shape.ranks);
    let depth = |n: usize| f64::from(binary_tree::depth(n));
    let mean = Share::of((1.5 * hosts as f64 - 1.0) / (shape.ranks as f64 - 1.0));
    Crossing { path: Share::of(depth(hosts) / depth(shape.ranks)), busiest: Share::of(1.0), mean }
}
