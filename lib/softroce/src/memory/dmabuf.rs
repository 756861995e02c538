//! Memory of another driver, as a file descriptor (dma-buf).
//!
//! A kernel's RDMA device gets the pages from the exporter. This one maps the descriptor, which exporters of the host's
//! memory allow (udmabuf, vgem, heaps). NVIDIA's driver does not for a GPU's: then the address in the requests is the
//! GPU's own, as in NCCL's requests and others', and CUDA's driver is called with it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A descriptor's memory in this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    mapped: usize,
    skip: usize,
}

// SAFETY: an address; see `Table` for the threads that touch what is there.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Returns true if the descriptor is a dma-buf.
///
/// # Errors
/// `EBADF` where it is no descriptor.
pub(crate) fn is_dmabuf(fd: BorrowedFd<'_>) -> io::Result<bool> {
    rustix::io::fcntl_getfd(fd)?;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    Ok(name.to_string_lossy().starts_with("/dmabuf:"))
}

impl Mapping {
    /// Maps `len` bytes from `offset` on.
    ///
    /// # Errors
    /// The exporter does not allow it, or has fewer bytes.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, writes: bool) -> io::Result<Mapping> {
        let page = rustix::param::page_size();
        let skip = (offset % page as u64) as usize;
        let mapped = len.max(1).checked_add(skip).ok_or(io::ErrorKind::InvalidInput)?;
        // A seek to a dma-buf's end gives its size. A page beyond it could be mapped by some exporters, not touched.
        let size = rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?;
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let access = if writes { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: new pages, where nothing is mapped.
        let base = unsafe { mmap(std::ptr::null_mut(), mapped, access, MapFlags::SHARED, fd, offset - skip as u64) }?;
        Ok(Mapping { base: base.cast(), mapped, skip })
    }

    /// The first byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.base.wrapping_add(self.skip)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; the region is out of the table, so no thread has a piece of it.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn only_dmabufs_are_taken() {
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).expect("a file");
        assert!(!is_dmabuf(file.as_fd()).expect("a descriptor"));
        // A descriptor of this number was never open.
        // SAFETY: not closed below, as it is forgotten.
        let closed = unsafe { OwnedFd::from_raw_fd(1 << 20) };
        assert_eq!(is_dmabuf(closed.as_fd()).expect_err("closed").raw_os_error(), Some(libc::EBADF));
        std::mem::forget(closed);
    }

    /// A file in memory stands for a dma-buf that lets itself be mapped.
    #[test]
    fn a_part_is_mapped_and_nothing_beyond_the_end() {
        let mut file = std::fs::File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("a file"));
        let page = rustix::param::page_size();
        let bytes: Vec<u8> = (0..3 * page).map(|i| (i / 7) as u8).collect();
        file.write_all(&bytes).expect("written");
        for (offset, len) in [(0, 3 * page), (page, page), (page + 5, 100), (3 * page, 0)] {
            let mapping = Mapping::new(file.as_fd(), offset as u64, len, true).expect("mapped");
            // SAFETY: mapped for reading, and no one writes to it.
            let seen = unsafe { std::slice::from_raw_parts(mapping.at(), len) };
            assert!(seen == &bytes[offset..offset + len], "{offset} {len}");
        }
        for (offset, len) in [(0, 3 * page + 1), (3 * page as u64, 1), (u64::MAX, 2)] {
            let error = Mapping::new(file.as_fd(), offset, len, false).expect_err("beyond the end");
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    }
}
