//! Callers' memory, registered with all devices of a rank.

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use super::table::Entry;
use crate::verbs::sys::{Access, Mr};
use tinynccl_plan::error::Result;
use tinynccl_sys::fork::Origin;

/// Memory registered with all devices of a rank: in their tables, until it is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    regions: Vec<(Arc<Device>, Mr)>,
    origin: Origin,
}

impl Registered {
    /// # Safety
    /// The memory must stay allocated, at its place, until this is dropped. `bytes` must not be 0. With
    /// [`Access::Target`] see [`Mr::new`].
    pub(super) unsafe fn new(
        devices: &[Arc<Device>],
        (base, bytes): (NonNull<u8>, usize),
        access: Access,
    ) -> Result<Registered> {
        // Filled device by device: a failure undoes what was done.
        let mut this = Registered { regions: Vec::with_capacity(devices.len()), origin: Origin::here() };
        for device in devices {
            // SAFETY: by the caller.
            let mr = unsafe { Mr::new(&device.pd, base, bytes, access) }?;
            device.registered.add(Entry { start: base.addr().get(), bytes, keys: (mr.lkey(), mr.rkey()) });
            this.regions.push((device.clone(), mr));
        }
        Ok(this)
    }
}

impl Drop for Registered {
    /// Out of the tables first: then no lookup finds a key that is about to end.
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // A forked child would end its parent's.
            return std::mem::forget(std::mem::take(&mut self.regions));
        }
        for (device, mr) in &self.regions {
            device.registered.remove(mr.lkey());
        }
    }
}
