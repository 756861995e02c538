//! Ranks that share memory, and the share of an algorithm's messages that leaves the host.
//!
//! Algorithms take the ranks of a host one after the other ([`program_on`](crate::algorithm::program_on)), so a
//! placement is one number: the ranks per *block*.
//! ```text
//! block 4:   0 1 2 3 | 4 5 6 7 | 8 9          a message within a block goes through memory, others over TCP
//! ```
//!
//! Source of the idea: NCCL's `src/graph/tuning.cc` prices a ring by how many of its hops leave the node.

use serde::{Deserialize, Serialize};

use crate::algorithm::Hosts;

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

    /// Placement of ranks, taken host by host. Hosts of different sizes count as blocks of their mean; the last may be
    /// smaller.
    pub fn on(hosts: &Hosts) -> Placement {
        let (count, first) = (hosts.count(), hosts.on(0).len());
        let last = hosts.on(count - 1).len();
        match (0..count - 1).all(|host| hosts.on(host).len() == first) && last <= first {
            _ if count == 1 => Placement::TOGETHER,
            true => Placement::blocks(first),
            false => Placement::blocks(hosts.ranks().div_ceil(count)),
        }
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
    fn hosts_become_blocks() {
        let on = |labels: &[usize]| Placement::on(&Hosts::of(labels));
        assert_eq!((on(&[1; 5]), on(&[])), (Placement::TOGETHER, Placement::TOGETHER));
        assert_eq!(on(&[0, 1, 2]), Placement::APART);
        assert_eq!(on(&[7, 7, 7, 3, 3, 3, 5]), Placement::blocks(3));
        assert_eq!(on(&[0, 1, 0, 1]), Placement::blocks(2), "round robin");
        assert_eq!(on(&[0, 0, 1, 1, 1, 1]), Placement::blocks(3), "the mean");
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
