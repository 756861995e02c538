//! One queue pair of a link, with what was posted to it.

use std::sync::Arc;

use super::layout::{Layout, PerRing};
use crate::config::MAX_QPS;
use crate::error::Result;
use crate::transport::verbs::rails::Device;
use crate::transport::verbs::sys::{Qp, Stretch, Write};

/// Requests between two that ask for a completion.
const SIGNAL: u64 = 16;
/// Receives that are posted again at once.
pub(in super::super) const REPOST: usize = 8;

/// A write with an immediate word, but for where the peer's memory is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: Stretch,
    /// Where it goes, in the peer's target memory.
    pub(super) offset: usize,
    pub(super) word: u32,
    pub(super) inline: bool,
    pub(super) signaled: bool,
    /// Follows `from` without a gap.
    pub(super) then: Option<Stretch>,
}

#[derive(Debug)]
pub(in super::super) struct Lane {
    pub(super) qp: Qp,
    pub(super) device: Arc<Device>,
    /// Its number within the link.
    index: usize,
    /// From where to where, for messages.
    pub(super) way: String,
    /// Key of our staging memory for its device, and of the peer's target memory for the peer's.
    pub(super) lkey: u32,
    pub(in super::super) rkey: u32,
    /// Requests posted and completed.
    pub(super) posted: u64,
    pub(super) completed: u64,
    unsignaled: u64,
    /// The last request that reads a caller's memory.
    pub(super) zero_copy_until: u64,
    /// The request that last read each place of the staging memory.
    pub(super) used: PerRing<Vec<u64>>,
    /// Receives used and not posted again.
    pub(super) used_receives: usize,
}

/// Bits of a request's id that hold its lane.
const LANE_BITS: u32 = MAX_QPS.ilog2();
const _: () = assert!(MAX_QPS.is_power_of_two());

/// Id of a lane's `number`th request, counted from 1; of its receives with number 0.
fn id(number: u64, lane: usize) -> u64 {
    number << LANE_BITS | lane as u64
}

/// The number of a request and its lane.
#[inline(always)]
pub(super) fn read_id(id: u64) -> (u64, usize) {
    (id >> LANE_BITS, id as usize & (MAX_QPS - 1))
}

impl Lane {
    pub(in super::super) fn new(
        index: usize,
        qp: Qp,
        device: &Arc<Device>,
        way: String,
        lkey: u32,
        layout: &Layout,
    ) -> Lane {
        // Only the first one sends lines.
        let lines = if index == 0 { layout.lines } else { 0 };
        Lane {
            qp,
            device: device.clone(),
            index,
            way,
            lkey,
            rkey: 0,
            posted: 0,
            completed: 0,
            unsignaled: 0,
            zero_copy_until: 0,
            used: PerRing::new(vec![0; lines], vec![0; layout.slots]),
            used_receives: 0,
        }
    }

    pub(in super::super) fn qp(&self) -> &Qp {
        &self.qp
    }

    pub(in super::super) fn post_receives(&self, n: usize) -> Result<()> {
        self.qp.post_receives(n, id(0, self.index))
    }

    /// Posts receives for those that were used, when there are some.
    #[inline]
    pub(super) fn repost(&mut self) -> Result<()> {
        if self.used_receives >= REPOST {
            self.post_receives(self.used_receives)?;
            self.used_receives = 0;
        }
        Ok(())
    }

    /// Posts a write to the peer's target memory at `remote`; its number.
    ///
    /// # Safety
    /// As [`Qp::post_write`]: what is read must stay until the request has completed.
    #[inline]
    pub(super) unsafe fn post(&mut self, remote: u64, piece: &Piece) -> Result<u64> {
        self.posted += 1;
        self.unsignaled += 1;
        let signaled = piece.signaled || self.unsignaled >= SIGNAL;
        if signaled {
            self.unsignaled = 0;
        }
        let write = Write {
            id: id(self.posted, self.index),
            local: piece.from.at,
            lkey: piece.from.lkey,
            len: piece.from.len,
            remote: remote + piece.offset as u64,
            rkey: self.rkey,
            word: piece.word,
            signaled,
            inline: piece.inline,
            then: piece.then,
        };
        // SAFETY: by the caller.
        unsafe { self.qp.post_write(&write) }?;
        Ok(self.posted)
    }

    /// Request `number` and all before it have completed.
    #[inline]
    pub(super) fn complete(&mut self, number: u64) {
        self.completed = self.completed.max(number);
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.posted - self.completed
    }

    /// No request reads a caller's memory any more, as far as is known.
    #[inline]
    pub(super) fn has_sent(&self) -> bool {
        self.completed >= self.zero_copy_until
    }
}

/// The queue pairs of a link: one at least, which carries all but further stripes.
#[derive(Debug)]
pub(in super::super) struct Lanes {
    pub(in super::super) first: Lane,
    pub(in super::super) others: Vec<Lane>,
}

impl Lanes {
    pub(super) fn len(&self) -> usize {
        1 + self.others.len()
    }

    #[inline(always)]
    pub(super) fn get(&self, index: usize) -> Option<&Lane> {
        if index == 0 { Some(&self.first) } else { self.others.get(index - 1) }
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut Lane> {
        if index == 0 { Some(&mut self.first) } else { self.others.get_mut(index - 1) }
    }

    #[inline(always)]
    pub(in super::super) fn iter(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.first).chain(&self.others)
    }

    #[inline(always)]
    pub(in super::super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_the_request_and_its_lane() {
        for (number, lane) in [(0, 0), (0, MAX_QPS - 1), (1, 3), (1 << 50, 15)] {
            assert_eq!(read_id(id(number, lane)), (number, lane));
        }
    }
}
