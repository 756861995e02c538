//! `/dev/udmabuf` (CONFIG_UDMABUF): a dmabuf of the pages of a memfd. Virtual machines use it for frame buffers.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// `struct udmabuf_create` of `linux/udmabuf.h`.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

const CREATE: libc::c_ulong = super::command(1, b'u', 0x42, size_of::<Create>());
const CLOSE_ON_EXEC: u32 = 1;

pub(super) fn make(len: usize) -> io::Result<OwnedFd> {
    let driver: File = super::open("/dev/udmabuf")?;
    let memory = memfd_create("cuda-verbs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, len as u64)?;
    // The driver pins the pages, so the file must not shrink.
    fcntl_add_seals(&memory, SealFlags::SHRINK)?;
    let memfd = u32::try_from(memory.as_raw_fd()).map_err(io::Error::other)?;
    let mut create = Create { memfd, flags: CLOSE_ON_EXEC, offset: 0, size: len as u64 };
    // SAFETY: the structure of this command; it holds no pointers.
    let fd = unsafe { super::ioctl(&driver, CREATE, &mut create) }?;
    // SAFETY: a new descriptor that the call returned, ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
