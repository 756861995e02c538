//! Where what lies on the board.
//!
//! ```text
//! sleepers                   how many ranks sleep: written only by those who fall asleep and wake up
//! per rank, page-aligned:
//!   finished                 last call this rank is done with
//!   asleep                   futex word of this rank
//!   announced                { sequence, header } of the last call that goes over links instead
//!   DEPTH slots              { line: number, header, 24 bytes } followed by the payload
//! ```

use std::sync::atomic::AtomicU64;

use crate::error::{Error, Result};

/// Calls a rank may be ahead of the slowest one.
pub(crate) const DEPTH: usize = 4;
/// Words that different ranks write are this far apart: two cache lines, because some cores prefetch lines in pairs.
const APART: usize = 128;
const PAGE: usize = 4096;

/// A slot's first cache line: everything a small message needs.
#[repr(C, align(64))]
pub(crate) struct Line {
    /// Number of the call, once the slot is complete.
    pub(crate) number: AtomicU64,
    pub(crate) header: [AtomicU64; 4],
    pub(crate) inline: [AtomicU64; 3],
}
const _: () = assert!(size_of::<Line>() == 64);

/// Offsets; all ranks compute the same from the same two figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    /// Payload bytes a slot holds.
    pub(crate) slot_bytes: usize,
}

impl Layout {
    /// # Errors
    /// [`Error::InvalidArgument`] when the board would not fit into the address space.
    pub(crate) fn new(ranks: usize, slot_bytes: usize) -> Result<Layout> {
        let layout = Layout { ranks, slot_bytes };
        let fits = ranks > 0 && slot_bytes <= 1 << 30 && ranks.checked_mul(layout.rank_stride()).is_some();
        fits.then_some(layout)
            .ok_or_else(|| Error::invalid("board", format!("{ranks} ranks with slots of {slot_bytes} bytes")))
    }

    fn slot_stride(&self) -> usize {
        // An odd number of line pairs: slots do not all start in the same cache set.
        (size_of::<Line>() + self.slot_bytes).next_multiple_of(2 * APART) + APART
    }

    fn rank_stride(&self) -> usize {
        (3 * APART + DEPTH * self.slot_stride()).next_multiple_of(PAGE)
    }

    /// Size of the board.
    pub(crate) fn bytes(&self) -> usize {
        PAGE + self.ranks * self.rank_stride()
    }

    fn rank(&self, rank: usize) -> usize {
        PAGE + rank * self.rank_stride()
    }

    pub(crate) fn finished(&self, rank: usize) -> usize {
        self.rank(rank)
    }

    pub(crate) fn asleep(&self, rank: usize) -> usize {
        self.rank(rank) + APART
    }

    pub(crate) fn announced(&self, rank: usize) -> usize {
        self.rank(rank) + 2 * APART
    }

    /// The line of `rank`'s slot for `call`; the payload follows it.
    pub(crate) fn slot(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + 3 * APART + (call as usize % DEPTH) * self.slot_stride()
    }
}
