//! Layout of the shared region.
//!
//! ```text
//! sleepers                   how many ranks sleep: written only by ranks that fall asleep and wake up
//! per rank, page-aligned:
//!   ends                     last call this rank is done with; number and digest of the last one that it has begun
//!   asleep                   futex word of this rank
//!   announced                { sequence, header } of the last call that goes over links instead
//!   LINES sums               checksums of the lines and their payloads, if enabled
//!   LINES lines              { number, header, 24 bytes }
//!   DEPTH slots              for calls with more than 24 bytes
//!   STAGES stages            for chunks of large calls
//! ```
//! There are more lines than slots, because their number limits small calls: a root that broadcasts reads the others'
//! `ends`, a cache line from each, once per LINES calls.

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::sync::Words;
use tinynccl_transport::shm::Sequence;

/// Calls a rank may be ahead of the slowest one. (The model has few, so that they are reused soon.)
pub(crate) const LINES: usize = if cfg!(loom) { 2 } else { 32 };
/// Calls with a slot that a rank may be ahead of the slowest one. Few would suffice for the data, but with more ranks
/// than cores a root without a free slot yields its core.
pub(crate) const DEPTH: usize = if cfg!(loom) { 1 } else { 16 };
/// Chunks with a stage that a rank may be ahead of the slowest one; at least two, because the next is written while
/// others read this one.
pub(crate) const STAGES: usize = if cfg!(loom) { 2 } else { 4 };
/// Words that different ranks write are this far apart: two cache lines, because some cores prefetch lines in pairs.
/// (The model's atomics are larger.)
const APART: usize = if cfg!(loom) { 256 } else { 128 };
const PAGE: usize = 4096;

/// A rank's line in a call. It holds the whole payload if that is short.
#[repr(C, align(64))]
pub(crate) struct Line {
    /// Number of the call, written last.
    pub(crate) number: Sequence,
    pub(crate) header: Words<4>,
    pub(crate) inline: Words<3>,
}
#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == 64);

/// Checksums of a line and of its payload, and the payload's bytes; written before the line's number.
pub(crate) type Sum = Words<2>;
/// Bytes of a rank's sums.
const SUMS: usize = (LINES * size_of::<Sum>()).next_multiple_of(APART);

/// Offsets; all ranks compute the same from the same two figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    /// Payload bytes that a slot holds.
    pub(crate) slot_bytes: usize,
    /// Bytes that a stage holds; 0: there are none.
    pub(crate) stage_bytes: usize,
}

impl Layout {
    /// # Errors
    /// [`Error::InvalidArgument`] when the shared region would not fit into the address space.
    pub(crate) fn new(ranks: usize, slot_bytes: usize, stage_bytes: usize) -> Result<Layout> {
        let layout = Layout { ranks, slot_bytes, stage_bytes };
        let fits =
            ranks > 0 && slot_bytes.max(stage_bytes) <= 1 << 30 && ranks.checked_mul(layout.rank_stride()).is_some();
        fits.then_some(layout)
            .ok_or_else(|| Error::invalid("shared region", format!("{ranks} ranks with slots of {slot_bytes} bytes")))
    }

    fn area_stride(&self) -> usize {
        // An odd number of line pairs, so that slots do not all start in the same cache set.
        self.slot_bytes.next_multiple_of(2 * APART) + APART
    }

    fn rank_stride(&self) -> usize {
        self.stages() + STAGES * self.stage_stride()
    }

    fn stage_stride(&self) -> usize {
        self.stage_bytes.next_multiple_of(PAGE)
    }

    /// Offsets of a rank's lines, and of its slots.
    const FIRST_LINE: usize = 3 * APART + SUMS;
    const AREAS: usize = Self::FIRST_LINE + LINES * size_of::<Line>();

    /// Offset of a rank's stages.
    fn stages(&self) -> usize {
        (Self::AREAS + DEPTH * self.area_stride()).next_multiple_of(PAGE)
    }

    /// Size of the shared region.
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

    /// `rank`'s slot for `call`.
    pub(crate) fn area(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + Self::AREAS + (call as usize % DEPTH) * self.area_stride()
    }

    /// `rank`'s stage for `call`.
    pub(crate) fn stage(&self, rank: usize, call: u64) -> usize {
        self.rank(rank) + self.stages() + (call as usize % STAGES) * self.stage_stride()
    }
}
