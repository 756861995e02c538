//! The regions of an RDMA device, by key.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use super::window::{Asker, Window, is_window};
use super::{Access, GpuMemory, Mapping, Piece, Refusal};
use crate::error::{Error, Result};

/// Kind of memory that a region's bytes are in.
#[derive(Debug)]
pub(crate) enum Backing {
    /// In the program's own memory.
    Host,
    /// In another driver's memory, mapped. Only kept.
    Dmabuf(#[allow(dead_code, reason = "unmapped when the region goes")] Mapping),
    /// In a GPU's memory: addresses that only its driver copies to and from.
    Gpu(GpuMemory),
}

/// A memory region.
#[derive(Debug)]
pub(crate) struct Region {
    /// Protection domain.
    pub(crate) pd: u32,
    /// First byte.
    pub(crate) at: *mut u8,
    /// Bytes.
    pub(crate) len: usize,
    /// The address of the first byte in requests.
    pub(crate) iova: u64,
    pub(crate) access: Access,
    pub(crate) backing: Backing,
}

impl Region {
    /// Ends its use: copies to it that are not waited for are done after this.
    fn settle(self) {
        if let Backing::Gpu(gpu) = &self.backing {
            gpu.settle();
        }
    }

    fn gpu(&self) -> Option<NonNull<GpuMemory>> {
        match &self.backing {
            Backing::Gpu(gpu) => Some(NonNull::from(gpu)),
            Backing::Host | Backing::Dmabuf(_) => None,
        }
    }
}

// SAFETY: an address and a length; see `Table` for the threads that touch what is there.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

#[derive(Debug, Default)]
struct Slot {
    region: Option<Region>,
    /// Low byte of the key: changes with each use of the slot, so that an old key does not open a new region.
    tag: u8,
    /// True if the remote key was invalidated, by a peer's SEND or a request of ours.
    invalidated: AtomicBool,
}

/// All regions of an RDMA device. A key is the number of a slot and a tag; a region's local and remote key are the
/// same, as rxe's are.
///
/// Pieces that it gives out are valid for as long as the memory is registered, which is no shorter than the lock around
/// the table is held for reading: the caller that registers memory promises to keep it until it is deregistered, and
/// that takes the lock for writing.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    pub(super) windows: Vec<Option<Window>>,
    pub(super) free_windows: Vec<usize>,
    /// Low byte of the newest window's first key.
    pub(super) window_tag: u8,
}

/// Keys have 23 bits for the slot, and the top bit is that of windows.
pub(crate) const MAX_REGIONS: usize = 1 << 23;

impl Table {
    /// Registers a region; returns its key.
    pub(crate) fn insert(&mut self, region: Region) -> Result<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < MAX_REGIONS => {
                // A tag that depends on the slot: a key with low byte 0 in every slot is easily guessed by mistake.
                self.slots.push(Slot {
                    tag: (self.slots.len() as u8).wrapping_mul(37).wrapping_add(0x5b),
                    ..Slot::default()
                });
                (self.slots.len() - 1) as u32
            }
            None => return Err(Error::full("a card has 2^23 memory regions at most")),
        };
        let slot = self.slots.get_mut(index as usize).ok_or_else(|| Error::full("no slot"))?;
        slot.tag = slot.tag.wrapping_add(1);
        slot.invalidated = AtomicBool::new(false);
        slot.region = Some(region);
        Ok(index << 8 | u32::from(slot.tag))
    }

    /// Puts another region behind a key, which is valid for remote access again. `false` where there is none. No thread
    /// has a piece of the old one, as the caller has the lock for writing.
    pub(crate) fn replace(&mut self, key: u32, region: Region) -> bool {
        let slot = self.slots.get_mut((key >> 8) as usize).filter(|s| s.tag == key as u8 && s.region.is_some());
        let Some(slot) = slot else { return false };
        slot.invalidated = AtomicBool::new(false);
        if let Some(old) = slot.region.replace(region) {
            old.settle();
        }
        self.forget_region(key);
        true
    }

    /// Takes a region out; `false` where there is none. No thread has a piece of it, as the caller has the lock for
    /// writing.
    pub(crate) fn remove(&mut self, key: u32) -> bool {
        let slot = self.slots.get_mut((key >> 8) as usize).filter(|s| s.tag == key as u8);
        let Some(region) = slot.and_then(|slot| slot.region.take()) else { return false };
        region.settle();
        self.free.push(key >> 8);
        self.forget_region(key);
        true
    }

    fn slot(&self, key: u32) -> Result<(&Slot, &Region), Refusal> {
        let slot = self.slots.get((key >> 8) as usize).filter(|s| s.tag == key as u8).ok_or(Refusal::Key(key))?;
        Ok((slot, slot.region.as_ref().ok_or(Refusal::Key(key))?))
    }

    /// The bytes from `va` to `va + len` of the region with key `key`, if domain `pd` has the rights `access` to them.
    /// No access of 0 bytes looks at a key (9.7.4.1.1 asks for that in remote accesses).
    pub(crate) fn check(&self, key: u32, pd: u32, va: u64, len: usize, access: Access) -> Result<Piece, Refusal> {
        if len == 0 {
            return Ok(Piece { at: NonNull::dangling().as_ptr(), len: 0, room: 0, gpu: None });
        }
        self.region(key, pd, va, len, access).map(|(_, piece)| piece)
    }

    /// Calls `f` with bytes that a peer requests by a region's or a window's key.
    pub(crate) fn remote<R>(
        &self,
        key: u32,
        by: Asker,
        va: u64,
        len: usize,
        access: Access,
        f: impl FnOnce(Piece) -> R,
    ) -> Result<R, Refusal> {
        if is_window(key) && len > 0 {
            return self.through_window(key, by, va, len, access, f);
        }
        self.check(key, by.pd, va, len, access).map(f)
    }

    /// A region, and bytes of it.
    pub(super) fn region(
        &self,
        key: u32,
        pd: u32,
        va: u64,
        len: usize,
        access: Access,
    ) -> Result<(&Region, Piece), Refusal> {
        let (slot, region) = self.slot(key)?;
        let remote = Access::REMOTE_WRITE.bits() | Access::REMOTE_READ.bits() | Access::REMOTE_ATOMIC.bits();
        if slot.invalidated.load(Ordering::Acquire) && access.bits() & remote != 0 {
            return Err(Refusal::Key(key));
        }
        if region.pd != pd {
            return Err(Refusal::Domain);
        }
        if !region.access.contains(access) {
            return Err(Refusal::Rights);
        }
        let offset = va.checked_sub(region.iova).ok_or(Refusal::Bounds)?;
        let end = offset.checked_add(len as u64).ok_or(Refusal::Bounds)?;
        if end > region.len as u64 {
            return Err(Refusal::Bounds);
        }
        let room = region.len - offset as usize;
        Ok((region, Piece { at: region.at.wrapping_add(offset as usize), len, room, gpu: region.gpu() }))
    }

    /// Ends the use of a remote key, as a peer's SEND with invalidate or a request of ours asks (10.6.7.2.5).
    pub(crate) fn invalidate(&self, key: u32, by: Asker) -> Result<(), Refusal> {
        if is_window(key) {
            return self.invalidate_window(key, by);
        }
        let (slot, region) = self.slot(key)?;
        if region.pd != by.pd {
            return Err(Refusal::Domain);
        }
        slot.invalidated.store(true, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region(at: *mut u8, len: usize, iova: u64) -> Region {
        Region { pd: 1, at, len, iova, access: Access::LOCAL_WRITE | Access::REMOTE_WRITE, backing: Backing::Host }
    }

    proptest! {
        /// No address and length give a byte outside.
        #[test]
        fn pieces_are_within_the_region(iova: u64, va: u64, near in -20i64..40, len in 0usize..60, far: bool) {
            let mut bytes = [0u8; 20];
            let start = bytes.as_mut_ptr() as usize;
            let mut table = Table::default();
            let key = table.insert(region(bytes.as_mut_ptr(), 20, iova)).expect("room");
            let va = if far { va } else { iova.wrapping_add_signed(near) };
            match table.check(key, 1, va, len, Access::REMOTE_WRITE) {
                Ok(piece) if piece.len() > 0 => {
                    let at = piece.addr() as usize;
                    prop_assert!(at >= start && at + piece.len() <= start + 20);
                    prop_assert_eq!((at - start) as u64, va.wrapping_sub(iova));
                }
                Ok(_) => prop_assert_eq!(len, 0),
                Err(refusal) => prop_assert_eq!(refusal, Refusal::Bounds),
            }
        }
    }

    #[test]
    fn keys_domains_and_rights_are_checked() {
        let mut bytes = [0u8; 20];
        let mut table = Table::default();
        let key = table.insert(region(bytes.as_mut_ptr(), 20, 0)).expect("room");
        let check = |table: &Table, key, pd, access| table.check(key, pd, 0, 1, access).map(|p| p.len());
        assert_eq!(check(&table, key, 1, Access::REMOTE_WRITE), Ok(1));
        assert_eq!(check(&table, key, 2, Access::REMOTE_WRITE), Err(Refusal::Domain));
        assert_eq!(check(&table, key, 1, Access::REMOTE_READ), Err(Refusal::Rights));
        assert_eq!(check(&table, key ^ 1, 1, Access::REMOTE_WRITE), Err(Refusal::Key(key ^ 1)));
        assert_eq!(table.invalidate(key, Asker { pd: 2, qpn: 7 }), Err(Refusal::Domain));
        assert_eq!(table.invalidate(key, Asker { pd: 1, qpn: 7 }), Ok(()));
        assert_eq!(check(&table, key, 1, Access::REMOTE_WRITE), Err(Refusal::Key(key)));
        assert_eq!(check(&table, key, 1, Access::LOCAL_WRITE), Ok(1), "a local use goes on");
        assert!(table.remove(key) && !table.remove(key));
        let again = table.insert(region(bytes.as_mut_ptr(), 20, 0)).expect("room");
        assert_ne!(again, key, "an old key does not open a new region");
    }

    #[test]
    fn a_key_goes_on_with_other_memory() {
        let (mut old, mut new) = ([0u8; 20], [0u8; 8]);
        let mut table = Table::default();
        let key = table.insert(region(old.as_mut_ptr(), 20, 0)).expect("room");
        table.invalidate(key, Asker { pd: 1, qpn: 7 }).expect("a region");
        assert!(table.replace(key, Region { pd: 2, ..region(new.as_mut_ptr(), 8, 100) }));
        assert_eq!(table.check(key, 1, 100, 8, Access::REMOTE_WRITE).err(), Some(Refusal::Domain));
        assert_eq!(table.check(key, 2, 0, 8, Access::REMOTE_WRITE).err(), Some(Refusal::Bounds));
        let piece = table.check(key, 2, 100, 8, Access::REMOTE_WRITE).expect("all of it");
        assert_eq!(piece.addr() as usize, new.as_ptr() as usize);
        assert!(table.remove(key));
        assert!(!table.replace(key, region(new.as_mut_ptr(), 8, 0)));
    }
}
