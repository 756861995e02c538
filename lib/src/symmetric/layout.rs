//! Where what lies on the board.
//!
//! ```text
//! sleepers                   how many ranks sleep: written only by those who fall asleep and wake up
//! per rank, page-aligned:
//!   ends                     last call this rank is done with; number and digest of the last one that it has begun
//!   asleep                   futex word of this rank
//!   announced                { sequence, header } of the last call that goes over links instead
//!   LINES sums               checksums of the lines and what belongs to them, where that is asked for
//!   LINES lines              { number, header, 24 bytes }
//!   DEPTH payload areas      for calls with more than 24 bytes
//!   STAGES stages            for chunks of large calls
//! ```
//! Lines are more than areas, because they are what keeps small calls going: a root that broadcasts looks at the others'
//! `ends`, which is a cache line from each of them, once per LINES calls.

use crate::error::{Error, Result};
use crate::transport::shm::Sequence;
use crate::transport::sync::Words;

/// Calls a rank may be ahead of the slowest one. (The model has few, so that they are reused soon.)
pub(crate) const LINES: usize = if cfg!(loom) { 2 } else { 32 };
/// The same for calls that use a payload area. Few would do for the data; but with more ranks than cores a root that has no
/// area left gives its core away.
pub(crate) const DEPTH: usize = if cfg!(loom) { 1 } else { 16 };
/// The same for chunks that use a stage; two at least, because the next is written while others read this one.
pub(crate) const STAGES: usize = if cfg!(loom) { 2 } else { 4 };
/// Words that different ranks write are this far apart: two cache lines, because some cores prefetch lines in pairs.
/// (The model's atomics are larger.)
const APART: usize = if cfg!(loom) { 256 } else { 128 };
const PAGE: usize = 4096;

/// What a rank says in a call: everything, if that is short.
#[repr(C, align(64))]
pub(crate) struct Line {
    /// Number of the call, once everything is there.
    pub(crate) number: Sequence,
    pub(crate) header: Words<4>,
    pub(crate) inline: Words<3>,
}
#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == 64);

/// Checksums of a line, written before its number: of the line, and of the payload that belongs to it; and the bytes of that.
pub(crate) type Sum = Words<2>;
/// Bytes of a rank's sums.
const SUMS: usize = (LINES * size_of::<Sum>()).next_multiple_of(APART);

/// Offsets; all ranks compute the same from the same two figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    /// Payload bytes an area holds.
    pub(crate) slot_bytes: usize,
    /// Bytes a stage holds; 0: there are none.
    pub(crate) stage_bytes: usize,
}

impl Layout {
    /// # Errors
    /// [`Error::InvalidArgument`] when the board would not fit into the address space.
    pub(crate) fn new(ranks: usize, slot_bytes: usize, stage_bytes: usize) -> Result<Layout> {
        let layout = Layout { ranks, slot_bytes, stage_bytes };
        let fits =
            ranks > 0 && slot_bytes.max(stage_bytes) <= 1 << 30 && ranks.checked_mul(layout.rank_stride()).is_some();
        fits.then_some(layout)
            .ok_or_else(|| Error::invalid("board", format!("{ranks} ranks with slots of {slot_bytes} bytes")))
    }

    fn area_stride(&self) -> usize {
        // An odd number of line pairs: areas do not all start in the same cache set.
        self.slot_bytes.next_multiple_of(2 * APART) + APART
    }

    fn rank_stride(&self) -> usize {
        self.stages() + STAGES * self.stage_stride()
    }

    fn stage_stride(&self) -> usize {
        self.stage_bytes.next_multiple_of(PAGE)
    }

    /// Where a rank's lines begin, and its payload areas.
    const FIRST_LINE: usize = 3 * APART + SUMS;
    const AREAS: usize = Self::FIRST_LINE + LINES * size_of::<Line>();

    /// Where a rank's stages begin.
    fn stages(&self) -> usize {
        (Self::AREAS + DEPTH * self.area_stride()).next_multiple_of(PAGE)
    }

    /// Size of the board.
    pub(crate) fn bytes(&self) -> usize {
        PAGE + self.ranks * self.rank_stride()
    }

    fn rank(&self, rank: usize) -> usize {
        PAGE + rank * self.rank_stride()
    }

    pub(crate) fn ends(&self, rank: usize) -> usize {
        self.rank(rank)
    }

    pub(crate) fn asleep(&self, rank: usize) -> usize {
        self.rank(rank) + APART
    }

    pub(crate) fn announced(&self, rank: usize) -> usize {
        self.rank(rank) + 2 * APART
    }

    /// The sums of `rank`'s line for `call`.
    pub(crate) fn sum(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + 3 * APART + (call as usize % LINES) * size_of::<Sum>()
    }

    /// `rank`'s line for `call`.
    pub(crate) fn line(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + Self::FIRST_LINE + (call as usize % LINES) * size_of::<Line>()
    }

    /// `rank`'s payload area for `call`.
    pub(crate) fn area(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + Self::AREAS + (call as usize % DEPTH) * self.area_stride()
    }

    /// `rank`'s stage for `call`.
    pub(crate) fn stage(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + self.stages() + (call as usize % STAGES) * self.stage_stride()
    }
}
