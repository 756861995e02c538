//! One queue pair of a link, with what was posted to it.

use std::sync::Arc;

use super::layout::{Layout, PerRing};
use crate::verbs::nics::Device;
use crate::verbs::sys::{Qp, Write};
use tinynccl_plan::error::Result;
use tinynccl_sys::config::MAX_QPS;

/// Requests between two that ask for a completion.
const SIGNAL: u64 = 16;
/// Receives that are posted again at once.
pub(crate) const REPOST: usize = 8;

/// A queue pair and the counts of its requests.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(super) handle: Qp,
    pub(super) device: Arc<Device>,
    /// Its number within the link.
    index: usize,
    /// From where to where, for messages.
    pub(super) ports: String,
    /// Key of our staging memory for its device, and of the peer's target memory for the peer's.
    pub(super) lkey: u32,
    pub(crate) rkey: u32,
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

/// Bits of a request's id that hold the index of its queue pair.
const INDEX_BITS: u32 = MAX_QPS.ilog2();
const _: () = assert!(MAX_QPS.is_power_of_two());

/// Id of a queue pair's `number`th request, counted from 1; of its receives with number 0.
fn id(number: u64, index: usize) -> u64 {
    number << INDEX_BITS | index as u64
}

/// The number of a request and the index of its queue pair.
#[inline(always)]
pub(super) fn read_id(id: u64) -> (u64, usize) {
    (id >> INDEX_BITS, id as usize & (MAX_QPS - 1))
}

impl QueuePair {
    pub(crate) fn new(
        index: usize,
        handle: Qp,
        device: &Arc<Device>,
        ports: String,
        lkey: u32,
        layout: &Layout,
    ) -> QueuePair {
        // Only the first one sends lines.
        let lines = if index == 0 { layout.lines } else { 0 };
        QueuePair {
            handle,
            device: device.clone(),
            index,
            ports,
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

    pub(crate) fn handle(&self) -> &Qp {
        &self.handle
    }

    pub(crate) fn post_receives(&self, n: usize) -> Result<()> {
        self.handle.post_receives(n, id(0, self.index))
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

    /// Posts a write to the peer's target memory; its number.
    ///
    /// # Safety
    /// As [`Qp::post_write`]: what is read must stay until the request has completed.
    #[inline]
    pub(super) unsafe fn post(&mut self, mut write: Write) -> Result<u64> {
        self.posted += 1;
        self.unsignaled += 1;
        write.signaled |= self.unsignaled >= SIGNAL;
        if write.signaled {
            self.unsignaled = 0;
        }
        // SAFETY: by the caller.
        unsafe { self.handle.post_write(id(self.posted, self.index), self.rkey, &write) }?;
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
pub(crate) struct QueuePairs {
    pub(crate) first: QueuePair,
    pub(crate) others: Vec<QueuePair>,
}

impl QueuePairs {
    pub(super) fn len(&self) -> usize {
        1 + self.others.len()
    }

    #[inline(always)]
    pub(super) fn get(&self, index: usize) -> Option<&QueuePair> {
        if index == 0 { Some(&self.first) } else { self.others.get(index - 1) }
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut QueuePair> {
        if index == 0 { Some(&mut self.first) } else { self.others.get_mut(index - 1) }
    }

    #[inline(always)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        std::iter::once(&self.first).chain(&self.others)
    }

    #[inline(always)]
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueuePair> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_the_request_and_its_lane() {
        for (number, index) in [(0, 0), (0, MAX_QPS - 1), (1, 3), (1 << 50, 15)] {
            assert_eq!(read_id(id(number, index)), (number, index));
        }
    }
}
