//! Layout of messages in registered memory, and the immediate word that announces them.
//!
//! ```text
//! lines   LINES of 512 bytes:          { Header 32 B, payload of up to 480 bytes }
//! slots   SLOTS of 64 + max_message:   { 32 unused, Header 32 B, payload }
//! ```
//! Both ends have this twice: staging memory to send from, target memory that the peer writes to. A message lies at the
//! same offset in both. Small messages have their own ring, so that many fit and one inline write carries each.

use crate::LinkOptions;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Header;

/// Bytes of a line, and the longest payload in it.
const LINE: usize = 512;
pub(crate) const SMALL: usize = LINE - Header::BYTES;
/// Before a slot's payload, so that it is 64-byte aligned.
const HEAD: usize = 64;

/// Lines, unless twice the depth is more.
const LINES: usize = 32;

/// The ring that a message is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ring {
    Lines = 0,
    Slots = 1,
}

impl Ring {
    pub(crate) const BOTH: [Ring; 2] = [Ring::Lines, Ring::Slots];
}

/// One number per ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PerRing<T> {
    lines: T,
    slots: T,
}

impl<T> PerRing<T> {
    pub(crate) fn new(lines: T, slots: T) -> PerRing<T> {
        PerRing { lines, slots }
    }

    #[inline(always)]
    pub(crate) fn of(&self, ring: Ring) -> &T {
        match ring {
            Ring::Lines => &self.lines,
            Ring::Slots => &self.slots,
        }
    }

    #[inline(always)]
    pub(crate) fn of_mut(&mut self, ring: Ring) -> &mut T {
        match ring {
            Ring::Lines => &mut self.lines,
            Ring::Slots => &mut self.slots,
        }
    }
}

/// Sizes; both ends compute the same from the same [`LinkOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) max_message: usize,
    pub(crate) lines: usize,
    pub(crate) slots: usize,
    /// Number of freed and unreported messages at which they are reported in a separate write.
    report: PerRing<u64>,
    stride: usize,
}

impl Layout {
    /// The receiver keeps up to `report - 1` freed slots to itself until it reports them, so there are as many more
    /// than `depth`: the link holds `depth` messages at any time.
    pub(crate) fn new(options: &LinkOptions) -> Result<Layout> {
        options.check()?;
        let depth = options.depth.next_power_of_two().max(2);
        let lines = LINES.max(2 * depth);
        let report = (depth / 2).max(1);
        Ok(Layout {
            max_message: options.max_message,
            lines,
            slots: depth + report,
            report: PerRing::new(lines as u64 / 4, report as u64),
            stride: HEAD + options.max_message.next_multiple_of(64),
        })
    }

    #[inline(always)]
    pub(crate) fn size(&self, ring: Ring) -> usize {
        match ring {
            Ring::Lines => self.lines,
            Ring::Slots => self.slots,
        }
    }

    #[inline(always)]
    pub(crate) fn report(&self, ring: Ring) -> u64 {
        *self.report.of(ring)
    }

    /// Longest payload of a message in this ring.
    #[inline(always)]
    pub(crate) fn longest(&self, ring: Ring) -> usize {
        match ring {
            Ring::Lines => SMALL.min(self.max_message),
            Ring::Slots => self.max_message,
        }
    }

    /// Place of the `n`th message of a ring, modulo the ring.
    #[inline(always)]
    pub(crate) fn place(&self, ring: Ring, n: u64) -> usize {
        (n % self.size(ring) as u64) as usize
    }

    /// Offset of the header at a place; the payload follows it.
    #[inline(always)]
    pub(crate) fn offset(&self, ring: Ring, place: usize) -> usize {
        match ring {
            Ring::Lines => place * LINE,
            Ring::Slots => self.lines * LINE + place * self.stride + HEAD - Header::BYTES,
        }
    }

    /// Bytes of one copy.
    pub(crate) fn bytes(&self) -> Result<usize> {
        (self.slots.checked_mul(self.stride))
            .and_then(|slots| slots.checked_add(self.lines * LINE))
            .ok_or_else(|| Error::invalid("connect", "slots larger than the address space"))
    }

    /// Receives that must be posted so that none of the peer's writes finds one missing: all its messages, our reports'
    /// counterparts, and the goodbye. See `link.rs`.
    pub(crate) fn receives(&self) -> usize {
        let reports: usize = Ring::BOTH.iter().map(|&r| self.size(r).div_ceil(self.report(r) as usize) + 1).sum();
        self.lines + self.slots + reports + 1
    }
}

/// The purpose of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteKind {
    /// A message in this ring.
    Message(Ring),
    /// Nothing but the counts.
    Report,
    /// The last write of this direction.
    Goodbye,
}

/// The counts of freed messages travel modulo this, which is more than twice any ring.
const MODULUS: u64 = 1 << 15;
const _: () = assert!(MODULUS as usize > 2 * (2 * LinkOptions::MAX_DEPTH));

/// The immediate word: what it is (2 bits), and how many messages of each ring the sender of the word has freed.
#[inline(always)]
pub(crate) fn word(kind: WriteKind, freed: &PerRing<u64>) -> u32 {
    let kind = match kind {
        WriteKind::Message(Ring::Lines) => 0,
        WriteKind::Message(Ring::Slots) => 1,
        WriteKind::Report => 2,
        WriteKind::Goodbye => 3u32,
    };
    let count = |ring| (freed.of(ring) % MODULUS) as u32;
    kind << 30 | count(Ring::Lines) << 15 | count(Ring::Slots)
}

/// The reverse: `before` are the counts known so far.
#[inline(always)]
pub(crate) fn read_word(word: u32, before: &PerRing<u64>) -> (WriteKind, PerRing<u64>) {
    let kind = match word >> 30 {
        0 => WriteKind::Message(Ring::Lines),
        1 => WriteKind::Message(Ring::Slots),
        2 => WriteKind::Report,
        _ => WriteKind::Goodbye,
    };
    let count = |before: u64, now: u32| before + (u64::from(now).wrapping_sub(before) % MODULUS);
    let lines = count(before.lines, word >> 15 & (MODULUS as u32 - 1));
    let slots = count(before.slots, word & (MODULUS as u32 - 1));
    (kind, PerRing::new(lines, slots))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_link_holds_depth_messages_while_the_receiver_has_not_reported() {
        for depth in [1, 2, 3, 4, 64, LinkOptions::MAX_DEPTH] {
            let layout = Layout::new(&LinkOptions { max_message: 70_001, depth }).unwrap();
            for ring in Ring::BOTH {
                assert!(layout.size(ring) + 1 - layout.report(ring) as usize >= depth, "{layout:?}");
                assert!((layout.size(ring) as u64) < MODULUS / 2);
            }
            let end = layout.offset(Ring::Slots, layout.slots - 1) + Header::BYTES + layout.max_message;
            assert!(end <= layout.bytes().unwrap());
            assert_eq!((layout.offset(Ring::Slots, 1) + Header::BYTES) % 64, 0);
            assert_eq!(layout.offset(Ring::Lines, layout.lines - 1) + LINE, layout.lines * LINE);
        }
    }

    proptest! {
        #[test]
        fn words_go_there_and_back(lines in 0u64..1 << 40, slots in 0u64..1 << 40, more in (0u64..9000, 0u64..9000), kind in 0usize..4) {
            let kind = [WriteKind::Message(Ring::Lines), WriteKind::Message(Ring::Slots), WriteKind::Report, WriteKind::Goodbye][kind];
            let before = PerRing::new(lines, slots);
            let now = PerRing::new(lines + more.0, slots + more.1);
            prop_assert_eq!(read_word(word(kind, &now), &before), (kind, now));
        }
    }
}
