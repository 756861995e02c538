//! Whole pages of this process: anonymous memory, or a mapped dmabuf.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A mapping that `drop` removes.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process; it is removed once, in `drop`. No one gets a reference to its bytes.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `len` zeroed bytes, already backed by pages.
    pub fn anonymous(len: usize) -> io::Result<Pages> {
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        Pages::of(start.cast(), len)
    }

    /// The first `len` bytes of a dmabuf.
    pub fn of_dmabuf(fd: impl AsFd, len: usize) -> io::Result<Pages> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0) }?;
        Pages::of(start.cast(), len)
    }

    fn of(start: *mut u8, len: usize) -> io::Result<Pages> {
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
        Ok(Pages { start, len })
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when it is empty, which the system refuses to map.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, removed once; those who use it hold its owner. An error leaves it mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
