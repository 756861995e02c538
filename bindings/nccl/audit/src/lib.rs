//! An audit library of glibc's loader (`LD_AUDIT`, rtld-audit(7)): a process that looks for a `libnccl.so.2`, by name
//! or by path, gets the file that `TINYNCCL_NCCL_LIBRARY` names.
//!
//! `LD_PRELOAD` is enough for programs that are linked to the library or open it by its name. JAX opens the file of
//! NVIDIA's wheel by its path, which a preloaded library does not answer. The loader calls this library before it opens
//! any file.
//!
//! The loader gives an audit library a separate namespace, with another copy of libc. Therefore nothing here starts a
//! thread, prints, or keeps anything but one string.

use std::ffi::{CStr, CString, c_char, c_uint};
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;

/// The file name that is looked for.
const WANTED: &[u8] = b"libnccl.so.2";
/// The variable with the path of the file to open instead.
const VARIABLE: &str = "TINYNCCL_NCCL_LIBRARY";
/// The newest version of the loader's interface that was read (glibc 2.35); `la_objsearch` is the same in both.
const NEWEST: c_uint = 2;

/// The version of the interface that we speak, at most the loader's.
#[unsafe(no_mangle)]
pub extern "C" fn la_version(loader: c_uint) -> c_uint {
    loader.min(NEWEST)
}

/// The path that the loader tries in place of `name`.
///
/// # Safety
/// `name` is a string that lives while the loader uses the answer, as rtld-audit(7) has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objsearch(name: *const c_char, _cookie: *mut usize, _flag: c_uint) -> *mut c_char {
    static PATH: OnceLock<Option<CString>> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
        CString::new(path.into_vec()).ok()
    });
    // SAFETY: the loader passes a string, by rtld-audit(7).
    let asked = if name.is_null() { None } else { Some(unsafe { CStr::from_ptr(name) }) };
    match (asked, path) {
        // The string lives as long as the process: it is in a static.
        (Some(asked), Some(path)) if is_wanted(asked.to_bytes()) => path.as_ptr().cast_mut(),
        _ => name.cast_mut(),
    }
}

fn is_wanted(name: &[u8]) -> bool {
    name.rsplit(|&byte| byte == b'/').next() == Some(WANTED)
}

#[cfg(test)]
mod tests {
    use super::is_wanted;

    #[test]
    fn only_the_file_name_counts() {
        for name in ["libnccl.so.2", "/opt/site-packages/nvidia/nccl/lib/libnccl.so.2", "./libnccl.so.2"] {
            assert!(is_wanted(name.as_bytes()), "{name}");
        }
        for name in ["", "libnccl.so", "libnccl.so.2.28.9", "libnccl.so.2/x", "/libnccl-net.so", "mylibnccl.so.2"] {
            assert!(!is_wanted(name.as_bytes()), "{name}");
        }
    }
}
