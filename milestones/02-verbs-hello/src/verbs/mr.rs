//! A memory region: memory that the device may reach, with the keys that prove the right to.

use std::alloc::{self, Layout};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ibverbs_sys as ffi;

use super::{Pd, complain};
use crate::words;

const PAGE: usize = 4096;

/// A memory region (`struct ibv_mr`) with memory of its own.
///
/// The device, and with the right keys the peer, write to this memory at any time. So there is never a `&[u8]` of it:
/// [`Mr::read`] and [`Mr::write`] copy, byte by byte and volatile.
#[derive(Debug)]
pub struct Mr {
    raw: NonNull<ffi::ibv_mr>,
    memory: NonNull<u8>,
    layout: Layout,
    /// Freed after `drop` has run.
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs allows every call from every thread; the memory is only reached by volatile copies.
unsafe impl Send for Mr {}
// SAFETY: as above. Copies of two threads may mix bytes, as the device's may; there are no references to break.
unsafe impl Sync for Mr {}

impl Mr {
    /// Takes `len` bytes of zeroed memory and registers them with the permissions `access` (`enum ibv_access_flags`).
    ///
    /// The kernel pins the pages: they stay where they are, and count against the limit of locked memory.
    pub fn new(pd: &Arc<Pd>, len: usize, access: u32) -> Result<Arc<Mr>> {
        ensure!(len > 0, "a memory region of 0 bytes");
        let layout = Layout::from_size_align(len, PAGE).context("size of a memory region")?;
        // SAFETY: the size is not 0.
        let Some(memory) = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }) else {
            bail!("no memory for a region of {len} bytes");
        };
        // SAFETY: the memory is ours and has `len` bytes; it is freed after the registration.
        let raw = unsafe { ffi::ibv_reg_mr(pd.raw(), memory.as_ptr().cast(), len, access as i32) };
        let Some(raw) = NonNull::new(raw) else {
            let cause = io::Error::last_os_error();
            // SAFETY: allocated above with this layout, and not registered.
            unsafe { alloc::dealloc(memory.as_ptr(), layout) };
            let hint = match cause.kind() {
                io::ErrorKind::OutOfMemory => "; `ulimit -l` shows how much memory may be locked",
                _ => "",
            };
            bail!("ibv_reg_mr({len} bytes, {}): {cause}{hint}", words::access(access));
        };
        Ok(Arc::new(Mr { raw, memory, layout, _pd: Arc::clone(pd) }))
    }

    /// Address of the first byte, as the device and the peer name it.
    pub fn address(&self) -> u64 {
        self.memory.as_ptr().addr() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The key for our own requests.
    pub fn lkey(&self) -> u32 {
        // SAFETY: registered, so the structure is there.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// The key that the peer must show.
    pub fn rkey(&self) -> u32 {
        // SAFETY: registered, so the structure is there.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// Copies `bytes` to `offset`. An error when they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = self.inside(offset..offset.saturating_add(bytes.len()))?;
        for (at, byte) in range.zip(bytes) {
            // SAFETY: `at` is below the length.
            unsafe { self.memory.add(at).write_volatile(*byte) };
        }
        Ok(())
    }

    /// A copy of the bytes of `range`. An error when it reaches beyond the region.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        // SAFETY: every index is below the length.
        Ok(self.inside(range)?.map(|at| unsafe { self.memory.add(at).read_volatile() }).collect())
    }

    /// The entry of a request's list that stands for the bytes of `range`.
    pub fn sge(&self, range: Range<usize>) -> Result<ffi::ibv_sge> {
        let range = self.inside(range)?;
        let length = u32::try_from(range.len()).context("a request of 4 GiB or more")?;
        Ok(ffi::ibv_sge { addr: self.address() + range.start as u64, length, lkey: self.lkey() })
    }

    fn inside(&self, range: Range<usize>) -> Result<Range<usize>> {
        ensure!(
            range.start <= range.end && range.end <= self.len(),
            "bytes {} to {} of a memory region of {}",
            range.start,
            range.end,
            self.len()
        );
        Ok(range)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered by us; QPs that use it held an `Arc` and are gone.
        let code = unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
        complain("ibv_dereg_mr", code);
        if code == 0 {
            // SAFETY: allocated in `new` with this layout. Had the device kept it, freeing would hand it foreign memory.
            unsafe { alloc::dealloc(self.memory.as_ptr(), self.layout) };
        }
    }
}
