//! vgem (CONFIG_DRM_VGEM): a graphics driver without hardware, made to test buffer sharing. Debian's kernels include it
//! as a module. It exports a "dumb" buffer the way any graphics driver does (PRIME).

use std::fs::{self, File};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// `struct drm_version` of `drm/drm.h`.
#[repr(C)]
struct Version {
    numbers: [i32; 3],
    name_len: usize,
    name: *mut u8,
    date_len: usize,
    date: *mut u8,
    desc_len: usize,
    desc: *mut u8,
}

/// `struct drm_mode_create_dumb` of `drm/drm_mode.h`.
#[repr(C)]
#[derive(Default)]
struct CreateDumb {
    height: u32,
    width: u32,
    bits_per_pixel: u32,
    flags: u32,
    handle: u32,
    pitch: u32,
    size: u64,
}

/// `struct drm_prime_handle` of `drm/drm.h`.
#[repr(C)]
struct PrimeHandle {
    handle: u32,
    flags: u32,
    fd: i32,
}

const VERSION: libc::c_ulong = super::command(3, b'd', 0x00, size_of::<Version>());
const CREATE_DUMB: libc::c_ulong = super::command(3, b'd', 0xb2, size_of::<CreateDumb>());
const HANDLE_TO_FD: libc::c_ulong = super::command(3, b'd', 0x2d, size_of::<PrimeHandle>());

/// A "picture" of this many bytes per line; the number of lines follows from the length.
const LINE: usize = 4096;

pub(super) fn make(len: usize) -> io::Result<OwnedFd> {
    let card = card()?;
    let height = u32::try_from(len.div_ceil(LINE)).map_err(io::Error::other)?;
    let mut dumb = CreateDumb { height, width: LINE as u32 / 4, bits_per_pixel: 32, ..CreateDumb::default() };
    // SAFETY: the structure of this command; it holds no pointers.
    unsafe { super::ioctl(&card, CREATE_DUMB, &mut dumb) }?;
    if dumb.size < len as u64 {
        return Err(io::Error::other(format!("a buffer of {} bytes instead of {len}", dumb.size)));
    }
    let flags = (libc::O_CLOEXEC | libc::O_RDWR) as u32;
    let mut prime = PrimeHandle { handle: dumb.handle, flags, fd: -1 };
    // SAFETY: the structure of this command; it holds no pointers. The handle goes with the file, the dmabuf stays.
    unsafe { super::ioctl(&card, HANDLE_TO_FD, &mut prime) }?;
    // SAFETY: a new descriptor that the call made, ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(prime.fd) })
}

/// The card whose driver is vgem. No other card will do: a dumb buffer of a real card may be in that card's memory.
fn card() -> io::Result<File> {
    for entry in fs::read_dir("/dev/dri")? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with("card") {
            continue;
        }
        let Ok(card) = super::open(entry.path()) else { continue };
        let mut name = [0_u8; 32];
        let nothing = std::ptr::null_mut();
        let mut version = Version {
            numbers: [0; 3],
            name_len: name.len(),
            name: name.as_mut_ptr(),
            date_len: 0,
            date: nothing,
            desc_len: 0,
            desc: nothing,
        };
        // SAFETY: the structure of this command; `name` has the length that it says, the others have none.
        if unsafe { super::ioctl(&card, VERSION, &mut version) }.is_ok() && name.starts_with(b"vgem") {
            return Ok(card);
        }
    }
    Err(io::Error::from_raw_os_error(libc::ENODEV))
}
