//! Page-locked memory for both device copies and the host's collectives, so no byte is copied between the two.
//!
//! The communicator allocates it (`Comm::alloc`), so that ranks of one host reduce in each other's slots. It is then
//! locked for the device and registered with RDMA devices that carry the links.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use crate::driver::cuda;
use tinynccl_comm::{Comm, SymmetricBuffer};
use tinynccl_plan::error::{Error, Result};
use tinynccl_transport::Registration;

/// Slots of a worker: one is filled, one is with the host, one is emptied.
pub(super) const DEPTH: usize = 3;

/// Slots of one worker.
#[derive(Debug)]
pub(super) struct Staging {
    context: Arc<CudaContext>,
    base: NonNull<u8>,
    slot: usize,
    kind: Kind,
    // Ends before the memory does.
    registration: Option<Registration>,
}

/// Owner of the memory.
#[derive(Debug)]
enum Kind {
    /// Locked here.
    Locked(#[expect(dead_code, reason = "keeps the memory")] SymmetricBuffer<u8>),
    /// The driver's, if other memory cannot be locked.
    Driver,
}

// SAFETY: it owns its memory, which only the worker's thread and the device access.
unsafe impl Send for Staging {}
// SAFETY: a shared reference gives addresses out, nothing else.
unsafe impl Sync for Staging {}

impl Staging {
    /// `slots` slots of `slot` bytes each. Every rank of `comm` calls it.
    pub(super) fn new(comm: &Comm, context: &Arc<CudaContext>, slots: usize, slot: usize) -> Result<Staging> {
        let bytes = slots * slot;
        let failed = |e| cuda("DeviceComm", format!("page-locking {} MiB of the host's memory", bytes >> 20), e);
        context.bind_to_thread().map_err(failed)?;
        let mut buffer = comm.alloc::<u8>(bytes)?;
        let at = buffer.as_mut_ptr();
        // First touched here, so that the pages are near our core.
        buffer.fill(0);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the buffer is ours and that long; unlocked by `drop` before it is freed.
        let (base, kind) = match unsafe { sys::cuMemHostRegister_v2(at.cast(), bytes, flags) }.result() {
            Ok(()) => (at, Kind::Locked(buffer)),
            Err(error) => {
                log::debug!("locking shared memory: {error:?}: the driver's own is taken instead");
                // SAFETY: allocates; freed once, by `drop`. Without write-combining: the CPU reads it.
                let memory = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }.map_err(failed)?;
                (memory.cast::<u8>(), Kind::Driver)
            }
        };
        let base = NonNull::new(base)
            .ok_or_else(|| Error::invalid("DeviceComm", "CUDA returned neither page-locked memory nor an error"))?;
        let mut staging = Staging { context: context.clone(), base, slot, kind, registration: None };
        // SAFETY: the memory stays where it is until `drop`, which ends the registration first.
        staging.registration = unsafe { comm.register(base, bytes) }?;
        Ok(staging)
    }

    /// The first byte of a slot.
    pub(super) fn slot(&self, index: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(index * self.slot)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.registration = None;
        if self.context.bind_to_thread().is_err() {
            return;
        }
        let base = self.base.as_ptr().cast();
        // SAFETY: locked or allocated by `new`; the owner drops this only when no copy uses it any more.
        let freed = unsafe {
            match self.kind {
                Kind::Locked(_) => sys::cuMemHostUnregister(base).result(),
                Kind::Driver => result::free_host(base),
            }
        };
        if let Err(error) = freed {
            log::debug!("unlocking the host's memory: {error:?}");
        }
    }
}
