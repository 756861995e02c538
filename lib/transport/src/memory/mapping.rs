//! Memory that two ends of a link share: anonymous within a process, a memfd between processes.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::huge;
use tinynccl_plan::error::{Error, Result};

/// A page-aligned, zeroed, readable and writable mapping. Pages cost memory once they are touched.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory, valid from any thread until `drop`; who may write where is the ring's protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above, `&Mapping` only gives out a pointer.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory of this process only.
    pub fn anonymous(len: usize) -> Result<Mapping> {
        // SAFETY: a new mapping at an address the kernel chooses touches no memory in use.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let mapping = Mapping::wrap(ptr, len)?;
        if huge::is_whole(len) {
            huge::advise(mapping.base, len, false);
        }
        Ok(mapping)
    }

    /// A new memfd of `len` bytes that can no longer change its size, and its mapping. Of huge pages if `len` is in
    /// whole ones and the system has them.
    pub fn memfd(len: usize) -> Result<(Mapping, OwnedFd)> {
        if let Some(fd) = huge::from_pool(len) {
            match Mapping::sized(fd, len) {
                Ok(made) => {
                    log::debug!("{len} bytes of shared memory: huge pages of the system's pool");
                    return Ok(made);
                }
                // Somebody else was faster.
                Err(e) => log::debug!("{len} bytes of shared memory from the pool of huge pages: {e}"),
            }
        }
        let os = |e| Error::errno("connect", format!("making {len} bytes of shared memory"), e);
        let fd = rustix::fs::memfd_create("tinynccl", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(os)?;
        let made = Mapping::sized(fd, len)?;
        if huge::is_whole(len) {
            huge::advise(made.0.base, len, true);
        }
        Ok(made)
    }

    /// Gives an empty memfd its size for good, and maps it.
    fn sized(fd: OwnedFd, len: usize) -> Result<(Mapping, OwnedFd)> {
        let os = |e| Error::errno("connect", format!("making {len} bytes of shared memory"), e);
        rustix::fs::ftruncate(&fd, len as u64).map_err(os)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(os)?;
        Ok((Mapping::shared(&fd, len)?, fd))
    }

    /// The mapping of a memfd that came from a peer. Refuses one whose size could change: touching memory past the end
    /// of a shrunk file would kill this process with SIGBUS.
    pub fn of_peer(fd: &OwnedFd, len: usize) -> Result<Mapping> {
        let os = |e| Error::errno("connect", format!("mapping {len} bytes of the peer's shared memory"), e);
        let refuse = |detail: String| Err(Error::invalid("connect", format!("shared memory of the peer: {detail}")));
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(os)?;
        if !seals.contains(SealFlags::SHRINK) {
            return refuse(format!("expected a memfd sealed against shrinking, got seals {seals:?}"));
        }
        let stat = rustix::fs::fstat(fd).map_err(os)?;
        let size = stat.st_size;
        if size != len as i64 {
            return refuse(format!("expected {len} bytes, got {size}"));
        }
        let mapping = Mapping::shared(fd, len)?;
        // Of huge pages from the pool, it has them already.
        if huge::is_whole(len) && stat.st_blksize as usize != huge::HUGE_PAGE {
            huge::advise(mapping.base, len, true);
        }
        Ok(mapping)
    }

    fn shared(fd: &impl AsFd, len: usize) -> Result<Mapping> {
        // SAFETY: a new mapping at an address the kernel chooses touches no memory in use.
        let ptr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        };
        Mapping::wrap(ptr, len)
    }

    fn wrap(ptr: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Result<Mapping> {
        let ptr = ptr.map_err(|e| Error::errno("connect", format!("mapping {len} bytes"), e))?;
        match NonNull::new(ptr.cast()) {
            Some(base) => Ok(Mapping { base, len }),
            None => Err(Error::invalid("connect", format!("mapping {len} bytes gave a null pointer"))),
        }
    }

    /// First byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of a mapping we made, and every pointer into it is held next to an `Arc`
        // of it.
        if let Err(e) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            log::error!("munmap of {} bytes failed: {e}", self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memfd_that_could_shrink_or_has_another_size_is_refused() {
        let (_, fd) = Mapping::memfd(8192).unwrap();
        assert_eq!(Mapping::of_peer(&fd, 8192).unwrap().len(), 8192);
        let e = Mapping::of_peer(&fd, 4096).unwrap_err().to_string();
        assert!(e.contains("expected 4096 bytes, got 8192"), "{e}");
        assert!(rustix::fs::ftruncate(&fd, 4096).is_err(), "the seal holds");

        let loose = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, 4096).unwrap();
        let e = Mapping::of_peer(&loose, 4096).unwrap_err().to_string();
        assert!(e.contains("sealed"), "{e}");
    }
}
