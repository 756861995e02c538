//! Registered memory of a link.

use std::ptr::NonNull;
use std::sync::Arc;

use super::sys::{Access, Mr, Pd};
use crate::error::Result;
use crate::transport::mapping::Mapping;

/// A mapping of our own and its registration, which goes first.
#[derive(Debug)]
pub(super) struct Region {
    mr: Mr,
    mapping: Mapping,
}

impl Region {
    pub(super) fn new(pd: &Arc<Pd>, bytes: usize, access: Access) -> Result<Region> {
        let mapping = Mapping::anonymous(bytes)?;
        // SAFETY: the mapping lives until after the registration; nobody holds references to bytes that the peer may write
        // at that time: the rings' credits see to that.
        let mr = unsafe { Mr::new(pd, mapping.base(), bytes, access) }?;
        Ok(Region { mr, mapping })
    }

    #[inline(always)]
    pub(super) fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    pub(super) fn rkey(&self) -> u32 {
        self.mr.rkey()
    }

    /// Address of the first byte.
    #[inline(always)]
    pub(super) fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Address of the byte at `offset`.
    ///
    /// # Safety
    /// `offset` must be within the region.
    #[inline(always)]
    pub(super) unsafe fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.mapping.len());
        // SAFETY: by the caller.
        unsafe { self.mapping.base().add(offset) }
    }
}
