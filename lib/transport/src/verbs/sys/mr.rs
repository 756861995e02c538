//! Registered memory: pages that stay where they are, and that the device may read or write.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Handle, Pd, ffi};
use tinynccl_plan::error::{Error, Result};

/// Permitted use of registered memory, besides the device reading it for its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Sent from.
    Source,
    /// Written by the peer.
    Target,
}

/// A registration. It does not own the memory: the caller that makes it keeps the memory for as long.
#[derive(Debug)]
pub(crate) struct Mr {
    raw: Handle<ffi::ibv_mr>,
    _pd: Arc<Pd>,
}

impl Mr {
    /// Registers `len` bytes at `base`.
    ///
    /// # Safety
    /// The memory must stay mapped, and the same pages, until the registration is dropped. With [`Access::Target`] no
    /// reference may be held to bytes that the peer is going to write.
    pub(crate) unsafe fn new(pd: &Arc<Pd>, base: NonNull<u8>, len: usize, access: Access) -> Result<Mr> {
        let flags = match access {
            Access::Source => 0,
            Access::Target => {
                (ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).0
            }
        };
        // SAFETY: the domain is valid; the memory is, by the caller.
        let raw = unsafe { ffi::ibv_reg_mr(pd.raw(), base.as_ptr().cast(), len, flags as i32) };
        let raw = Handle::new(raw, || format!("registering {len} bytes with {}", pd.context().name()));
        raw.map(|raw| Mr { raw, _pd: pd.clone() }).map_err(|e| explain(e, len))
    }

    /// Key for our own device.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the registration is valid and nobody writes to this structure.
        unsafe { (*self.raw.get()).lkey }
    }

    /// Key for the peer.
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: as `lkey`.
        unsafe { (*self.raw.get()).rkey }
    }
}

/// Registered memory counts against a limit of the process that is often low.
fn explain(error: Error, len: usize) -> Error {
    match error {
        Error::Os { op, detail, errno: errno @ (libc::ENOMEM | libc::EAGAIN | libc::EPERM) } => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
            let detail = format!(
                "{detail}: the limit of locked memory is {limit} and this wants {len} bytes more; raise it (ulimit -l unlimited, \
                 or LimitMEMLOCK= of the service), or lower TINYNCCL_VERBS_CHUNK or TINYNCCL_FIFO_DEPTH"
            );
            Error::Os { op, detail, errno }
        }
        other => other,
    }
}
