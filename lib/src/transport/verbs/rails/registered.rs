//! Callers' memory, registered with all devices of a rank.

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::Device;
use super::table::Entry;
use crate::error::Result;
use crate::fork::Origin;
use crate::transport::verbs::sys::{Access, Mr};

/// Memory registered with all devices of a rank: in their tables, until it is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    start: usize,
    regions: Vec<(Arc<Device>, Mr)>,
    origin: Origin,
}

impl Registered {
    /// # Safety
    /// The memory must stay allocated, at its place, until this is dropped. `bytes` must not be 0.
    pub(super) unsafe fn new(devices: &[Arc<Device>], base: NonNull<u8>, bytes: usize) -> Result<Registered> {
        // Filled device by device: a failure undoes what was done.
        let mut this =
            Registered { start: base.addr().get(), regions: Vec::with_capacity(devices.len()), origin: Origin::here() };
        for device in devices {
            // SAFETY: by the caller; the device only reads.
            let mr = unsafe { Mr::new(&device.pd, base, bytes, Access::Source) }?;
            device.registered.add(Entry { start: this.start, bytes, lkey: mr.lkey() });
            this.regions.push((device.clone(), mr));
        }
        Ok(this)
    }
}

impl Drop for Registered {
    /// Out of the tables first: then nobody finds a key that is about to end.
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // A forked child would end its parent's.
            return std::mem::forget(std::mem::take(&mut self.regions));
        }
        for (device, _) in &self.regions {
            device.registered.remove(self.start);
        }
    }
}
