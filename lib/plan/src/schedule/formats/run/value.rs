//! Content of a chunk.

use std::rc::Rc;

/// Ranks that an error lists.
const LISTED: usize = 8;

/// A part of a segment of some ranks' inputs, combined.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Value {
    pub(super) segment: usize,
    pub(super) part: usize,
    /// A set of bits.
    ranks: Rc<[u64]>,
}

impl Value {
    /// The first part of a rank's input.
    pub(super) fn input(rank: usize, ranks: usize) -> Value {
        let mut set = vec![0u64; ranks.div_ceil(64)];
        set[rank / 64] |= 1 << (rank % 64);
        Value { segment: 0, part: 0, ranks: set.into() }
    }

    /// This value of another part.
    pub(super) fn at(&self, segment: usize, part: usize) -> Value {
        Value { segment, part, ranks: Rc::clone(&self.ranks) }
    }

    /// The number of ranks whose inputs are in it.
    pub(super) fn ranks(&self) -> usize {
        self.ranks.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Both combined, or what is wrong with that.
    pub(super) fn combine(&self, other: &Value) -> Result<Value, String> {
        if (self.segment, self.part) != (other.segment, other.part) {
            let place = |v: &Value| format!("part {} of segment {} of {}", v.part, v.segment, v.names());
            return Err(format!("combines {} with {}", place(self), place(other)));
        }
        if let Some(word) = self.ranks.iter().zip(&*other.ranks).position(|(a, b)| a & b != 0) {
            let rank = word * 64 + (self.ranks[word] & other.ranks[word]).trailing_zeros() as usize;
            let (ours, theirs) = (self.names(), other.names());
            return Err(format!("combines the input of rank {rank} twice: {ours} and {theirs}"));
        }
        let ranks: Vec<u64> = self.ranks.iter().zip(&*other.ranks).map(|(a, b)| a | b).collect();
        Ok(Value { ranks: ranks.into(), ..*self })
    }

    /// Its ranks, in words.
    fn names(&self) -> String {
        let all = (0..self.ranks.len() * 64).filter(|rank| self.ranks[rank / 64] >> (rank % 64) & 1 == 1);
        let mut names: Vec<String> = all.map(|rank| rank.to_string()).collect();
        let what = if names.len() == 1 { "rank" } else { "ranks" };
        if names.len() > LISTED {
            let more = names.len() - LISTED;
            names.truncate(LISTED);
            names.push(format!("{more} more"));
        }
        format!("{what} {}", names.join(", "))
    }
}
