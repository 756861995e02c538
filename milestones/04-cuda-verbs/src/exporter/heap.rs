//! `/dev/dma_heap/system` (CONFIG_DMABUF_HEAPS_SYSTEM): a dmabuf of pages from the kernel, as used on Android.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// `struct dma_heap_allocation_data` of `linux/dma-heap.h`.
#[repr(C)]
struct Allocation {
    len: u64,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

const ALLOC: libc::c_ulong = super::command(3, b'H', 0, size_of::<Allocation>());

pub(super) fn make(len: usize) -> io::Result<OwnedFd> {
    let heap: File = super::open("/dev/dma_heap/system")?;
    let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
    let mut allocation = Allocation { len: len as u64, fd: 0, fd_flags: flags, heap_flags: 0 };
    // SAFETY: the structure of this command; it holds no pointers.
    unsafe { super::ioctl(&heap, ALLOC, &mut allocation) }?;
    let fd = i32::try_from(allocation.fd).map_err(io::Error::other)?;
    // SAFETY: a new descriptor that the call made, ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
