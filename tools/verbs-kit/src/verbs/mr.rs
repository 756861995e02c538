//! A memory region: memory that the device may access, and the keys that grant the access.

use std::alloc::{self, Layout};
use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};

use super::{Pd, complain, ffi};
use crate::words;

const PAGE: usize = 4096;

/// A memory region (`struct ibv_mr`) over its own memory ([`Mr::new`]) or over another owner's ([`Mr::over`],
/// [`Mr::of_dmabuf`]: milestone 04).
///
/// The device, and with the right keys the peer, may write to this memory at any time. So there is never a `&[u8]` of
/// it: [`Mr::read`] and [`Mr::write`] make volatile copies, byte by byte.
#[derive(Debug)]
pub struct Mr {
    raw: NonNull<ffi::ibv_mr>,
    address: u64,
    len: usize,
    memory: Memory,
    /// Freed after `drop` has run.
    _pd: Arc<Pd>,
}

/// The owner of the memory.
#[derive(Debug)]
enum Memory {
    /// We own it and free it.
    Own(NonNull<u8>, Layout),
    /// This owner keeps it until the registration is gone.
    Of(Option<Arc<dyn Any + Send + Sync>>),
}

// SAFETY: libibverbs allows every call from every thread; the memory is only reached by volatile copies.
unsafe impl Send for Mr {}
// SAFETY: as above. Concurrent copies may mix bytes, as the device's writes may; there are no references to invalidate.
unsafe impl Sync for Mr {}

impl Mr {
    /// Allocates `len` zeroed bytes and registers them with the permissions `access` (`enum ibv_access_flags`).
    ///
    /// The kernel pins the pages: they stay in place and count against the limit on locked memory.
    pub fn new(pd: &Arc<Pd>, len: usize, access: u32) -> Result<Arc<Mr>> {
        ensure!(len > 0, "a memory region of 0 bytes");
        let layout = Layout::from_size_align(len, PAGE).context("size of a memory region")?;
        // SAFETY: the size is not 0.
        let Some(memory) = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }) else {
            bail!("no memory for a region of {len} bytes");
        };
        let address = memory.as_ptr().addr() as u64;
        // SAFETY: the memory is ours and has `len` bytes; `drop` frees it after the registration.
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
        log::debug!("registered {len} bytes at {address:#x}, {}", words::access(access));
        Ok(Arc::new(Mr { raw, address, len, memory: Memory::Own(memory, layout), _pd: Arc::clone(pd) }))
    }

    /// Registers `len` bytes at `address` that `owner` keeps alive: pages of this process, or addresses that another
    /// driver resolves (a GPU's, with its peer-memory module). The error is the kernel's errno.
    ///
    /// # Safety
    /// The memory stays valid as long as `owner` lives, and no one uses a `&` or `&mut` to it while the device may
    /// write there.
    pub unsafe fn over(
        pd: &Arc<Pd>,
        address: u64,
        len: usize,
        access: u32,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Arc<Mr>> {
        let start = ptr::without_provenance_mut::<u8>(address as usize);
        // SAFETY: the caller's promise; the kernel checks that there are pages behind the address.
        let raw = unsafe { ffi::ibv_reg_mr(pd.raw(), start.cast(), len, access as i32) };
        Mr::of(raw, pd, address, len, owner)
    }

    /// Registers `len` bytes at `offset` of a dmabuf. Requests and the peer use `address` for its first byte. The error
    /// is the kernel's errno: EOPNOTSUPP when the device's driver does not support dmabufs.
    ///
    /// # Safety
    /// As for [`Mr::over`]. The registration itself keeps the dmabuf's memory alive, so `fd` may be closed.
    pub unsafe fn of_dmabuf(
        pd: &Arc<Pd>,
        fd: BorrowedFd<'_>,
        (offset, len): (u64, usize),
        address: u64,
        access: u32,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Arc<Mr>> {
        // SAFETY: the caller's promise; the kernel checks descriptor and range.
        let raw = unsafe { ffi::ibv_reg_dmabuf_mr(pd.raw(), offset, len, address, fd.as_raw_fd(), access as i32) };
        Mr::of(raw, pd, address, len, owner)
    }

    /// Probes dmabuf support: the driver's errno for the invalid descriptor -1 is EBADF when it can import dmabufs, and
    /// EOPNOTSUPP or a similar code when it cannot.
    pub fn ask_dmabuf(pd: &Arc<Pd>) -> io::Error {
        // SAFETY: the descriptor has no memory behind it, so the call cannot register any.
        let raw = unsafe { ffi::ibv_reg_dmabuf_mr(pd.raw(), 0, 0, 0, -1, 0) };
        let cause = io::Error::last_os_error();
        if let Some(raw) = NonNull::new(raw) {
            // SAFETY: just registered by the call above and not in use.
            complain("ibv_dereg_mr", unsafe { ffi::ibv_dereg_mr(raw.as_ptr()) });
        }
        cause
    }

    fn of(
        raw: *mut ffi::ibv_mr,
        pd: &Arc<Pd>,
        address: u64,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Arc<Mr>> {
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        log::debug!("registered {len} bytes at {address:#x} of another owner");
        Ok(Arc::new(Mr { raw, address, len, memory: Memory::Of(Some(owner)), _pd: Arc::clone(pd) }))
    }

    /// Address of the first byte in requests of the device and the peer.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The key for our own requests.
    pub fn lkey(&self) -> u32 {
        // SAFETY: registered, so the structure is there.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// The key that the peer's requests must carry.
    pub fn rkey(&self) -> u32 {
        // SAFETY: registered, so the structure is there.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// Copies `bytes` to `offset`. Fails when they do not fit or when the region does not own its memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let memory = self.own()?;
        let range = self.inside(offset..offset.saturating_add(bytes.len()))?;
        for (at, byte) in range.zip(bytes) {
            // SAFETY: `at` is below the length.
            unsafe { memory.add(at).write_volatile(*byte) };
        }
        Ok(())
    }

    /// Copies the bytes of `range` out. Fails when it reaches beyond the region or when the region does not own its
    /// memory.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        let memory = self.own()?;
        // SAFETY: every index is below the length.
        Ok(self.inside(range)?.map(|at| unsafe { memory.add(at).read_volatile() }).collect())
    }

    /// The scatter/gather entry for the bytes of `range`.
    pub fn sge(&self, range: Range<usize>) -> Result<ffi::ibv_sge> {
        let range = self.inside(range)?;
        let length = u32::try_from(range.len()).context("a request of 4 GiB or more")?;
        Ok(ffi::ibv_sge { addr: self.address() + range.start as u64, length, lkey: self.lkey() })
    }

    fn own(&self) -> Result<NonNull<u8>> {
        match self.memory {
            Memory::Own(memory, _) => Ok(memory),
            Memory::Of(_) => bail!("the memory of this region belongs to another owner"),
        }
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
        // If deregistration failed, the device could still write here, so the memory must not be freed.
        match &mut self.memory {
            // SAFETY: allocated in `new` with this layout, and registered no more.
            Memory::Own(memory, layout) if code == 0 => unsafe { alloc::dealloc(memory.as_ptr(), *layout) },
            Memory::Of(owner) if code != 0 => std::mem::forget(owner.take()),
            Memory::Own(..) | Memory::Of(_) => {}
        }
    }
}
