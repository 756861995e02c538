//! A dmabuf without a GPU: two Linux drivers can export host pages as one. An RDMA driver imports it like a GPU's, so
//! the first stage of the probe can run for real without a GPU.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use crate::buffer::pages::Pages;
use crate::why::{Why, errno};

mod udmabuf;
mod vgem;

/// A dmabuf of host pages, mapped.
#[derive(Debug)]
pub struct Made {
    /// The dmabuf.
    pub fd: OwnedFd,
    /// Its pages.
    pub pages: Pages,
    /// Name of the exporter, for display.
    pub source: String,
}

/// Creates a dmabuf of at least `len` bytes with the first driver that can. The error lists each driver's answer.
pub fn make(len: usize) -> Result<Made, Why> {
    // Whole pages: a length that every exporter accepts.
    let len = len.next_multiple_of(rustix::param::page_size());
    let mut said = Vec::new();
    for (name, maker) in [("/dev/udmabuf", udmabuf::make as fn(usize) -> io::Result<OwnedFd>), ("vgem", vgem::make)] {
        let made = maker(len).and_then(|fd| {
            let pages = Pages::of_dmabuf(&fd, len)?;
            Ok(Made { fd, pages, source: name.to_owned() })
        });
        match made {
            Ok(made) => return Ok(made),
            Err(cause) => said.push(format!("{name}: {}", errno(&cause))),
        }
    }
    Err(Why::new(
        format!("no dmabuf can be made of host memory either ({})", said.join("; ")),
        "`modprobe udmabuf` or `modprobe vgem` as root, if the kernel has one of them",
    ))
}

fn open(path: impl AsRef<Path>) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// `_IOC` of `linux/ioctl.h`: direction (1 to the kernel, 2 from it, 3 both), size, driver, number.
const fn command(direction: u32, driver: u8, number: u8, size: usize) -> libc::c_ulong {
    ((direction << 30) | ((size as u32) << 16) | ((driver as u32) << 8) | number as u32) as libc::c_ulong
}

/// An ioctl with a structure that the kernel reads and may change. Returns what the call returns.
///
/// # Safety
/// `command` takes a structure of type `T`, and every pointer in it is valid for what the kernel does with it.
unsafe fn ioctl<T>(file: &impl AsRawFd, command: libc::c_ulong, argument: &mut T) -> io::Result<i32> {
    // SAFETY: the caller's promise.
    let code = unsafe { libc::ioctl(file.as_raw_fd(), command, std::ptr::from_mut(argument)) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_the_headers() {
        // The numbers that strace prints for linux/udmabuf.h and drm/drm.h.
        assert_eq!(command(1, b'u', 0x42, 24), 0x4018_7542);
        assert_eq!(command(3, b'd', 0xb2, 32), 0xc020_64b2);
    }

    #[test]
    fn a_dmabuf_is_made_or_every_driver_says_why_not() {
        match make(100_000) {
            Ok(made) => {
                assert!(made.pages.len() >= 100_000);
                // SAFETY: the first byte of a mapping that no one else uses.
                unsafe { made.pages.start().write_volatile(42) };
                let again = Pages::of_dmabuf(&made.fd, made.pages.len()).expect("maps again");
                // SAFETY: as above; the same page at another address.
                assert_eq!(unsafe { again.start().read_volatile() }, 42);
            }
            Err(why) => {
                for name in ["/dev/udmabuf: ", "vgem: "] {
                    assert!(why.reason.contains(name), "{why}");
                }
            }
        }
    }
}
