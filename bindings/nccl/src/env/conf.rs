//! Files of variables, as NCCL reads them: the one that `NCCL_CONF_FILE` names, else `~/.nccl.conf`, then
//! `/etc/nccl.conf`. A variable of the environment counts more, and of two lines the first.

use std::collections::HashMap;
use std::ffi::{CStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Longest name or value that counts, as in NCCL.
const LONGEST: usize = 1023;
const OF_ALL: &str = "/etc/nccl.conf";

/// The variables of the files, which are read once.
pub(crate) fn variables() -> &'static HashMap<String, String> {
    static ALL: OnceLock<HashMap<String, String>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all = HashMap::new();
        for file in files(std::env::var_os("NCCL_CONF_FILE"), home()) {
            if let Ok(bytes) = std::fs::read(&file) {
                read(&bytes, &mut all);
            }
        }
        all
    })
}

/// The files, the first first.
fn files(named: Option<OsString>, home: Option<PathBuf>) -> Vec<PathBuf> {
    let own = match named.filter(|name| !name.is_empty()) {
        Some(named) => Some(PathBuf::from(named)),
        None => home.map(|home| home.join(".nccl.conf")),
    };
    own.into_iter().chain([Path::new(OF_ALL).to_owned()]).collect()
}

/// Returns the user's home directory by the password database, regardless of `HOME`; `None` if it has none.
fn home() -> Option<PathBuf> {
    let mut room = vec![0; 16 << 10];
    let mut found = std::ptr::null_mut();
    // SAFETY: plain data, which the call fills in.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    // SAFETY: our variables; `room` has the length that is passed.
    let status = unsafe {
        libc::getpwuid_r(libc::getuid(), &raw mut entry, room.as_mut_ptr().cast(), room.len(), &raw mut found)
    };
    if status != 0 || found.is_null() || entry.pw_dir.is_null() {
        return None;
    }
    // SAFETY: a text in `room`, ended by a zero.
    let folder = unsafe { CStr::from_ptr(entry.pw_dir) };
    Some(PathBuf::from(OsString::from_vec(folder.to_bytes().to_vec())))
}

/// Lines `NAME=value`; `#` begins a comment where it is the first letter. Nothing is trimmed, as in NCCL.
fn read(bytes: &[u8], all: &mut HashMap<String, String>) {
    let text = |bytes: &[u8]| {
        let until_zero = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        std::ffi::OsStr::from_bytes(&until_zero[..until_zero.len().min(LONGEST)]).to_string_lossy().into_owned()
    };
    for line in bytes.split(|&byte| byte == b'\n').filter(|line| !line.starts_with(b"#")) {
        if let Some(end) = line.iter().position(|&byte| byte == b'=') {
            all.entry(text(&line[..end])).or_insert_with(|| text(&line[end + 1..]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_names_and_values() {
        let mut all = HashMap::new();
        let long = "x".repeat(2000);
        let file =
            format!("# NCCL_A=0\nNCCL_A=1\nNCCL_A=2\n\nno value\nNCCL_B=x=y\n NCCL_C= z\nNCCL_D=\nNCCL_E={long}");
        read(file.as_bytes(), &mut all);
        read(b"NCCL_A=3\r\nNCCL_F=\xff", &mut all);
        let of = |name: &str| all.get(name).map(String::as_str);
        assert_eq!(
            (of("NCCL_A"), of("NCCL_B"), of(" NCCL_C"), of("NCCL_C")),
            (Some("1"), Some("x=y"), Some(" z"), None)
        );
        assert_eq!((of("NCCL_D"), of("NCCL_E").map(str::len), of("NCCL_F")), (Some(""), Some(1023), Some("\u{fffd}")));
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn a_file_that_is_named_takes_the_place_of_the_users() {
        let files = |named: Option<&str>| files(named.map(OsString::from), Some("/home/u".into()));
        let paths = |all: &[&str]| all.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(files(None), paths(&["/home/u/.nccl.conf", "/etc/nccl.conf"]));
        assert_eq!(files(Some("")), paths(&["/home/u/.nccl.conf", "/etc/nccl.conf"]));
        assert_eq!(files(Some("/x")), paths(&["/x", "/etc/nccl.conf"]));
    }
}
