//! Tree: sums go up one binary tree, results come down.
//!
//! ```text
//!                 up lanes                       down lanes
//!                    0                               0        one lane: reduces, then sends
//!                    ^                               v
//!                    4                               4
//!                  /   \                           /   \
//!                 2     6                         2     6
//!                / \   /                         / \   /
//!               1   3 5                         1   3 5
//! ```
//! Up and down are separate lanes, so that window 1 goes up while window 0 comes down; NCCL gives them to different
//! warps. Only the root has one lane for both, because it sends the result back down. A node with two children keeps
//! the first partial sum in scratch memory of one window, which stays in the cache.
//!
//! | collective | hops (D = ⌊log₂(n-1)⌋+1) | bytes sent per rank (S: bytes of the segment) |
//! |---|---|---|
//! | all_reduce, barrier | 2D | S to the parent, S to each child |
//! | broadcast | D | S to each child |
//! | reduce | D | S to the parent |
//! | all_gather | 2D - 2, at least 1 | S, and n · S for each child; the root S: see `tree_segments.rs` |
//! | reduce_scatter | 2D - 2, at least 1 | (n-1) · S |
//!
//! Sources: NCCL `src/graph/trees.cc`, `src/device/all_reduce.h` (`runTreeSplit`). Shape: [`super::binary_tree`].

use super::binary_tree::{Laid, Node, Tree};
use super::{Shape, tree_segments};
use crate::schedule::{Lane, Loc, Partition, Program, Step};
use crate::wire::Collective;

/// The program of `rank` among two or more.
pub(super) fn program(shape: &Shape, rank: usize) -> Option<Program> {
    let tree = laid(shape);
    let lanes = (0..shape.channels).flat_map(|c| lanes(shape.collective, &tree, rank, c)).collect();
    let scratch_segments = scratch_segments(shape.collective, &tree, rank);
    Some(Program { parts: shape.channels, span: 1, scratch_segments, lanes })
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    copies_sent(shape.collective, &laid(shape), rank) * partition.total_bytes(0..shape.channels)
}

fn laid(shape: &Shape) -> Laid {
    Laid { tree: Tree::First, n: shape.ranks, root: shape.root }
}

/// Number of segments that a rank sends.
pub(super) fn copies_sent(collective: Collective, tree: &Laid, rank: usize) -> u64 {
    let node = tree.node(rank);
    let up = u64::from(node.parent.is_some());
    let down = node.children().count() as u64;
    match collective {
        Collective::Broadcast => down,
        Collective::Reduce => up,
        Collective::AllGather if up == 0 => 1,
        Collective::AllGather => 1 + down * tree.n as u64,
        Collective::ReduceScatter => tree.n as u64 - 1,
        _ => up + down,
    }
}

/// Scratch memory a rank needs.
pub(super) fn scratch_segments(collective: Collective, tree: &Laid, rank: usize) -> usize {
    let node = tree.node(rank);
    let both = node.parent.is_some() && node.children().count() > 1;
    match collective {
        Collective::Broadcast | Collective::AllGather => 0,
        Collective::ReduceScatter if both => tree_segments::scratch_segments(tree, rank),
        _ => usize::from(both),
    }
}

/// The lanes of one rank in one tree, which works on part `c` over channel `c`.
pub(super) fn lanes(collective: Collective, tree: &Laid, rank: usize, c: usize) -> Vec<Lane> {
    let lanes = match collective {
        Collective::AllGather => vec![tree_segments::all_gather(tree, rank, c)],
        Collective::ReduceScatter => vec![tree_segments::reduce_scatter(tree, rank, c)],
        _ => whole(collective, &tree.node(rank), c),
    };
    lanes.into_iter().map(|steps| Lane { channel: c as u32, steps }).collect()
}

/// For collectives in which all ranks have the same segment: it goes up and down as a whole.
fn whole(collective: Collective, node: &Node, c: usize) -> Vec<Vec<Step>> {
    let (up, down) = (collective != Collective::Broadcast, collective != Collective::Reduce);
    match node.parent {
        None => vec![root_lane(node, c, up, down)],
        Some(parent) => [up.then(|| up_lane(node, parent, c)), down.then(|| down_lane(node, parent, c))]
            .into_iter()
            .flatten()
            .collect(),
    }
}

/// Adds the children's sums to our input and passes the result to the parent.
fn up_lane(node: &Node, parent: usize, c: usize) -> Vec<Step> {
    let (input, tmp) = (Loc::input(0, c), Loc::scratch(0, c));
    match node.children {
        [Some(a), Some(b)] => {
            vec![Step::recv_reduce_copy(a, input, tmp, false), Step::recv_reduce_send(b, parent, tmp)]
        }
        [Some(a), None] | [None, Some(a)] => vec![Step::recv_reduce_send(a, parent, input)],
        [None, None] => vec![Step::send(parent, input)],
    }
}

/// Passes the parent's result to the children.
fn down_lane(node: &Node, parent: usize, c: usize) -> Vec<Step> {
    let output = Loc::output(0, c);
    let mut children = node.children();
    match children.next() {
        None => vec![Step::recv(parent, output)],
        Some(a) => std::iter::once(Step::recv_copy_send(parent, a, output))
            .chain(children.map(|b| Step::send(b, output)))
            .collect(),
    }
}

/// Sends the data that came up back down, or starts or ends it.
fn root_lane(node: &Node, c: usize, up: bool, down: bool) -> Vec<Step> {
    let (input, output) = (Loc::input(0, c), Loc::output(0, c));
    let children: Vec<usize> = node.children().collect();
    let mut steps = vec![];
    if !up {
        steps.extend(children.iter().map(|&child| Step::send(child, input)));
        steps.push(Step::Copy { src: input, dst: output });
        return steps;
    }
    for (i, &child) in children.iter().enumerate() {
        let src = if i == 0 { input } else { output };
        let last = i + 1 == children.len();
        steps.push(match children.first() {
            Some(&first) if last && down => Step::recv_reduce_copy_send(child, first, src, output, true),
            _ => Step::recv_reduce_copy(child, src, output, last),
        });
    }
    if down {
        steps.extend(children.iter().skip(1).map(|&child| Step::send(child, output)));
    }
    steps
}
