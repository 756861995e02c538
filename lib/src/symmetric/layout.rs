//! Where what lies on the board.
//!
//! ```text
//! sleepers                   how many ranks sleep: written only by those who fall asleep and wake up
//! per rank, page-aligned:
//!   finished                 last call this rank is done with
//!   asleep                   futex word of this rank
//!   announced                { sequence, header } of the last call that goes over links instead
//!   LINES lines              { number, header, 24 bytes }
//!   DEPTH payload areas      for calls with more than 24 bytes
//! ```
//! Lines are more than areas, because they are what keeps small calls going: a root that broadcasts looks at the others'
//! `finished`, which is a cache line from each of them, once per LINES calls.

use std::sync::atomic::AtomicU64;

use crate::error::{Error, Result};

/// Calls a rank may be ahead of the slowest one.
pub(crate) const LINES: usize = 32;
/// The same for calls that use a payload area. Few would do for the data; but with more ranks than cores a root that has no
/// area left gives its core away.
pub(crate) const DEPTH: usize = 16;
/// Words that different ranks write are this far apart: two cache lines, because some cores prefetch lines in pairs.
const APART: usize = 128;
const PAGE: usize = 4096;

/// What a rank says in a call: everything, if that is short.
#[repr(C, align(64))]
pub(crate) struct Line {
    /// Number of the call, once everything is there.
    pub(crate) number: AtomicU64,
    pub(crate) header: [AtomicU64; 4],
    pub(crate) inline: [AtomicU64; 3],
}
const _: () = assert!(size_of::<Line>() == 64);

/// Offsets; all ranks compute the same from the same two figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    /// Payload bytes an area holds.
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

    fn area_stride(&self) -> usize {
        // An odd number of line pairs: areas do not all start in the same cache set.
        self.slot_bytes.next_multiple_of(2 * APART) + APART
    }

    fn rank_stride(&self) -> usize {
        (3 * APART + LINES * size_of::<Line>() + DEPTH * self.area_stride()).next_multiple_of(PAGE)
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

    /// `rank`'s line for `call`.
    pub(crate) fn line(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + 3 * APART + (call as usize % LINES) * size_of::<Line>()
    }

    /// `rank`'s payload area for `call`.
    pub(crate) fn area(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + 3 * APART + LINES * size_of::<Line>() + (call as usize % DEPTH) * self.area_stride()
    }
}
