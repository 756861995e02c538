//! A memory region: memory that the device may reach, with the keys that prove the right to.

use std::alloc::{self, Layout};
use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ibverbs_sys as ffi;

use super::{Pd, complain};
use crate::words;

const PAGE: usize = 4096;

/// A memory region (`struct ibv_mr`), with memory of its own ([`Mr::new`]) or over somebody else's ([`Mr::over`],
/// [`Mr::of_dmabuf`]: milestone 04).
///
/// The device, and with the right keys the peer, write to this memory at any time. So there is never a `&[u8]` of it:
/// [`Mr::read`] and [`Mr::write`] copy, byte by byte and volatile.
#[derive(Debug)]
pub struct Mr {
    raw: NonNull<ffi::ibv_mr>,
    address: u64,
    len: usize,
    memory: Memory,
    /// Freed after `drop` has run.
    _pd: Arc<Pd>,
}

/// Whose memory it is.
#[derive(Debug)]
enum Memory {
    /// Ours, to be freed.
    Own(NonNull<u8>, Layout),
    /// Held by this owner until the registration is gone.
    Of(Option<Arc<dyn Any + Send + Sync>>),
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
        let address = memory.as_ptr().addr() as u64;
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
        log::debug!("registered {len} bytes at {address:#x}, {}", words::access(access));
        Ok(Arc::new(Mr { raw, address, len, memory: Memory::Own(memory, layout), _pd: Arc::clone(pd) }))
    }

    /// Registers `len` bytes at `address` that `owner` keeps: pages of this process, or addresses that another driver
    /// resolves (a GPU's, with its peer-memory module). The error is the kernel's errno.
    ///
    /// # Safety
    /// The memory stays valid as long as `owner`, and no `&` or `&mut` to it is used while the device may write there.
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

    /// Registers `len` bytes at `offset` of a dmabuf. Requests and the peer name its first byte `address`. The error is
    /// the kernel's errno: EOPNOTSUPP when the device's driver cannot do it at all.
    ///
    /// # Safety
    /// As for [`Mr::over`]. The registration keeps the dmabuf's memory itself; `fd` may be closed.
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

    /// What the device's driver says to a dmabuf that is none (descriptor -1): EBADF when it can import one, EOPNOTSUPP
    /// or alike when it cannot.
    pub fn ask_dmabuf(pd: &Arc<Pd>) -> io::Error {
        // SAFETY: there is no memory behind it; nothing can be registered.
        let raw = unsafe { ffi::ibv_reg_dmabuf_mr(pd.raw(), 0, 0, 0, -1, 0) };
        let cause = io::Error::last_os_error();
        if let Some(raw) = NonNull::new(raw) {
            // SAFETY: just registered, whatever it is, and used by nobody.
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

    /// Address of the first byte, as the device and the peer name it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
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

    /// Copies `bytes` to `offset`. An error when they do not fit, or when the memory is not the region's own.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let memory = self.own()?;
        let range = self.inside(offset..offset.saturating_add(bytes.len()))?;
        for (at, byte) in range.zip(bytes) {
            // SAFETY: `at` is below the length.
            unsafe { memory.add(at).write_volatile(*byte) };
        }
        Ok(())
    }

    /// A copy of the bytes of `range`. An error when it reaches beyond the region, or when the memory is not its own.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        let memory = self.own()?;
        // SAFETY: every index is below the length.
        Ok(self.inside(range)?.map(|at| unsafe { memory.add(at).read_volatile() }).collect())
    }

    /// The entry of a request's list that stands for the bytes of `range`.
    pub fn sge(&self, range: Range<usize>) -> Result<ffi::ibv_sge> {
        let range = self.inside(range)?;
        let length = u32::try_from(range.len()).context("a request of 4 GiB or more")?;
        Ok(ffi::ibv_sge { addr: self.address() + range.start as u64, length, lkey: self.lkey() })
    }

    fn own(&self) -> Result<NonNull<u8>> {
        match self.memory {
            Memory::Own(memory, _) => Ok(memory),
            Memory::Of(_) => bail!("the memory of this region belongs to somebody else"),
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
        // Had the device kept it, freeing would hand it foreign memory.
        match &mut self.memory {
            // SAFETY: allocated in `new` with this layout, and registered no more.
            Memory::Own(memory, layout) if code == 0 => unsafe { alloc::dealloc(memory.as_ptr(), *layout) },
            Memory::Of(owner) if code != 0 => std::mem::forget(owner.take()),
            Memory::Own(..) | Memory::Of(_) => {}
        }
    }
}
