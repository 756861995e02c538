//! Symmetric memory: one region per rank in memory that all ranks map.

use std::sync::{Arc, Weak};

use tinynccl_transport::huge::HUGE_PAGE;
use tinynccl_transport::mapping::Mapping;

const PAGE: usize = 4096;

/// Bytes between two ranks' regions of an allocation of `bytes` per rank.
pub(crate) fn region_bytes(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(if bytes >= HUGE_PAGE { HUGE_PAGE } else { PAGE })
}

/// The memory of one `Comm::alloc`, on all ranks.
#[derive(Debug)]
pub(crate) struct Allocation {
    memory: Arc<Mapping>,
    /// Number of the allocation on its communicator, from 1; equal on all ranks.
    id: u32,
    rank: usize,
    region: usize,
}

impl Allocation {
    /// `memory` has `region` bytes for every rank.
    pub(crate) fn new(memory: Arc<Mapping>, id: u32, rank: usize, region: usize) -> Allocation {
        Allocation { memory, id, rank, region }
    }

    /// First byte of `rank`'s region.
    pub(crate) fn base(&self, rank: usize) -> *mut u8 {
        self.memory.base().as_ptr().wrapping_add(rank * self.region)
    }

    /// Offset of `bytes` at `address` in our own region.
    fn offset(&self, address: usize, bytes: usize) -> Option<usize> {
        let offset = address.checked_sub(self.base(self.rank) as usize)?;
        (offset.checked_add(bytes)? <= self.region).then_some(offset)
    }

    /// `len` bytes at `offset` of `rank`'s region, if they lie in it.
    pub(super) fn place(&self, rank: usize, offset: u64, len: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let fits = offset.checked_add(len)? <= self.region && (rank + 1) * self.region <= self.memory.len();
        fits.then(|| self.base(rank).wrapping_add(offset))
    }
}

/// The allocations of a communicator that are still in use.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// Allocations made so far, the same on all ranks: with none, no call searches.
    made: u32,
    live: Vec<Weak<Allocation>>,
}

/// A buffer that lies in symmetric memory.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) allocation: Arc<Allocation>,
    pub(super) id: u32,
    pub(super) offset: usize,
}

impl Registry {
    /// True if this communicator has ever had symmetric memory; equal on all ranks.
    #[inline]
    pub(crate) fn in_use(&self) -> bool {
        self.made > 0
    }

    /// The id of the next allocation.
    pub(crate) fn next_id(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    pub(crate) fn add(&mut self, allocation: &Arc<Allocation>) {
        self.live.retain(|a| a.strong_count() > 0);
        self.live.push(Arc::downgrade(allocation));
    }

    /// Finds the allocation that holds all of `bytes` bytes at `address`.
    pub(super) fn find(&self, address: *const u8, bytes: usize) -> Option<Found> {
        self.live.iter().rev().filter_map(Weak::upgrade).find_map(|allocation| {
            let offset = allocation.offset(address as usize, bytes)?;
            Some(Found { id: allocation.id, offset, allocation })
        })
    }
}
