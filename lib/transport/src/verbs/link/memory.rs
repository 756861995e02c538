//! Registered memory of a link.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::mapping::Mapping;
use crate::verbs::sys::{Access, Mr, Pd};
use tinynccl_plan::error::Result;

/// Our own mapping and its registrations, one per device, which go first.
#[derive(Debug)]
pub(crate) struct Region {
    mrs: Vec<Mr>,
    mapping: Mapping,
}

impl Region {
    /// Memory that the devices of all `domains` know.
    pub(crate) fn new<'a>(
        domains: impl IntoIterator<Item = &'a Arc<Pd>>,
        bytes: usize,
        access: Access,
    ) -> Result<Region> {
        let mapping = Mapping::anonymous(bytes)?;
        // SAFETY: the mapping lives until after the registrations; nobody holds references to bytes that the peer may
        // write at that time: the rings' credits see to that.
        let register = |pd| unsafe { Mr::new(pd, mapping.base(), bytes, access) };
        let mrs = domains.into_iter().map(register).collect::<Result<Vec<Mr>>>()?;
        Ok(Region { mrs, mapping })
    }

    /// The registration with domain number `domain`, as they were given.
    pub(crate) fn mr(&self, domain: usize) -> Option<&Mr> {
        self.mrs.get(domain)
    }

    /// Address of the first byte.
    #[inline(always)]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Address of the byte at `offset`.
    ///
    /// # Safety
    /// `offset` must be within the region.
    #[inline(always)]
    pub(crate) unsafe fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.mapping.len());
        // SAFETY: by the caller.
        unsafe { self.mapping.base().add(offset) }
    }
}
