//! Double tree: two complementary binary trees, each carrying half of the data.
//!
//! In one tree half of the ranks are leaves, which send once and never add: half of the bandwidth and arithmetic is
//! idle. In the second tree leaves and inner nodes change places. n = 7:
//! ```text
//!   channel 0 (even parts)      channel 1 (odd parts)
//!      0-----4                     3-----0
//!           / \                   / \
//!          2   6                 5   1
//!         / \ /                 / \   \
//!        1  3 5                6   4   2
//! ```
//! Leaves of the first (1, 3, 5) are inner nodes of the second. Each pair of trees takes two channels: both trees may
//! use a pair of ranks in the same direction, and messages of one link have one order.
//!
//! | collective | hops (D = ⌊log₂(n-1)⌋+1) | bytes sent per rank (S: bytes of the segment) |
//! |---|---|---|
//! | all_reduce, barrier | 2D | ≤ 2S (one tree: up to 3S) |
//! | broadcast | D | ≤ S (one tree: up to 2S) |
//! | reduce | D | S |
//! | all_gather | 2D - 2, at least 1 | ≤ (n+1) · S (one tree: up to (2n+1) · S) |
//! | reduce_scatter | 2D - 2, at least 1 | (n-1) · S |
//!
//! Sources: P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
//! scan" (2009); S. Jeaugey, "Massively scale your deep learning training with NCCL 2.4" (2019); NCCL
//! `src/graph/trees.cc`.

use super::binary_tree::{Laid, Tree};
use super::{Shape, tree};
use crate::schedule::{Partition, Program};

/// The program of `rank` among two or more. It uses 2 channels per pair of trees, even when `shape.channels` is 1.
pub(super) fn program(shape: &Shape, rank: usize) -> Option<Program> {
    let mut lanes = vec![];
    let mut scratch_segments = 0;
    for c in 0..channels(shape) {
        let tree = laid(shape, c);
        scratch_segments = scratch_segments.max(tree::scratch_segments(shape.collective, &tree, rank));
        lanes.extend(tree::lanes(shape.collective, &tree, rank, c));
    }
    Some(Program { parts: channels(shape), span: 1, scratch_segments, lanes })
}

/// Payload bytes that `rank` sends.
pub(super) fn bytes_sent(shape: &Shape, rank: usize, partition: &Partition) -> u64 {
    (0..channels(shape))
        .map(|c| tree::copies_sent(shape.collective, &laid(shape, c), rank) * partition.total_bytes(c..c + 1))
        .sum()
}

/// Channels used: an even number.
pub fn channels(shape: &Shape) -> usize {
    (shape.channels & !1).max(2)
}

fn laid(shape: &Shape, channel: usize) -> Laid {
    let tree = if channel.is_multiple_of(2) { Tree::First } else { Tree::Second };
    Laid { tree, n: shape.ranks, root: shape.root }
}
