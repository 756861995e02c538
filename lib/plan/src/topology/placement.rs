//! Ranks that share memory, and the share of an algorithm's messages that leaves the host.
//!
//! Launchers number the ranks of a host one after the other, so a placement is one number: the ranks per *block*.
//! ```text
//! block 4:   0 1 2 3 | 4 5 6 7 | 8 9          a message within a block goes through memory, others over TCP
//! ```
//! With any other numbering, every message is assumed to leave the host.
//!
//! Source of the idea: NCCL's `src/graph/tuning.cc` prices a ring by how many of its hops leave the node.

use serde::{Deserialize, Serialize};

/// Ranks `k·block` to `(k+1)·block - 1` share memory; 1: no two ranks do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Placement {
    block: usize,
}

impl Placement {
    /// All ranks share memory.
    pub const TOGETHER: Placement = Placement { block: usize::MAX };
    /// No two ranks share memory.
    pub const APART: Placement = Placement { block: 1 };

    /// Blocks of this many ranks (at least 1).
    pub fn blocks(block: usize) -> Placement {
        Placement { block: block.max(1) }
    }

    /// From a label per rank, equal for ranks that share memory.
    pub fn of<T: PartialEq>(labels: &[T]) -> Placement {
        let Some(first) = labels.first() else { return Placement::TOGETHER };
        let block = labels.iter().take_while(|&label| label == first).count();
        if block == labels.len() {
            return Placement::TOGETHER;
        }
        let regular = labels.chunks(block).enumerate().all(|(i, chunk)| {
            let start = i * block;
            // One label throughout, and not that of an earlier block.
            chunk.iter().all(|label| Some(label) == chunk.first())
                && labels.iter().take(start).all(|label| Some(label) != chunk.first())
        });
        if regular { Placement { block } } else { Placement::APART }
    }

    /// Ranks per block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Number of blocks among `ranks`.
    pub fn hosts(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.block.max(1)).max(1)
    }

    /// Ranks in the block of `rank`.
    pub fn block_of(&self, rank: usize, ranks: usize) -> usize {
        let start = rank / self.block * self.block;
        self.block.min(ranks.saturating_sub(start)).max(1)
    }

    /// Returns true if two ranks are in different blocks.
    pub fn separates(&self, a: usize, b: usize) -> bool {
        a / self.block != b / self.block
    }
}

/// Shares (0 to 1) of what an algorithm sends that leave the host.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Share {
    /// Share of the messages.
    pub messages: f64,
    /// Share of the bytes.
    pub bytes: f64,
}

impl Share {
    /// Returns `share`, clamped to 0 to 1, of messages and of bytes.
    pub fn of(share: f64) -> Share {
        let share = share.clamp(0.0, 1.0);
        Share { messages: share, bytes: share }
    }
}

/// The shares that leave the host, for the three views of [`Work`](super::terms::Work).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Crossing {
    /// Shares on the longest chain of messages.
    pub path: Share,
    /// Shares of the busiest rank.
    pub busiest: Share,
    /// Shares of all ranks together.
    pub mean: Share,
}

impl Crossing {
    /// Returns `share` for all three.
    pub fn of(share: f64) -> Crossing {
        Crossing { path: Share::of(share), busiest: Share::of(share), mean: Share::of(share) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_become_blocks() {
        assert_eq!(Placement::of(&["a"; 5]), Placement::TOGETHER);
        assert_eq!(Placement::of::<&str>(&[]), Placement::TOGETHER);
        assert_eq!(Placement::of(&[0, 1, 2]), Placement::APART);
        assert_eq!(Placement::of(&[7, 7, 3, 3, 5]), Placement::blocks(2));
        assert_eq!(Placement::of(&[0, 0, 1, 0]), Placement::APART, "round robin");
        assert_eq!(Placement::of(&[0, 0, 1, 1, 0, 0]), Placement::APART, "a host comes twice");
        assert_eq!(Placement::of(&[0, 0, 1, 1, 1]), Placement::APART, "a block longer than the first");
    }

    #[test]
    fn blocks_count_hosts_and_separate_ranks() {
        let p = Placement::blocks(4);
        assert_eq!((p.hosts(10), p.block_of(9, 10), p.block_of(3, 10)), (3, 2, 4));
        assert!(p.separates(3, 4) && !p.separates(4, 7));
        assert_eq!((Placement::TOGETHER.hosts(1000), Placement::TOGETHER.block_of(5, 10)), (1, 10));
        assert_eq!(Placement::APART.hosts(7), 7);
    }
}
