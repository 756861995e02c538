//! The folder of a user's sockets: one for each process that has a communicator.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tinynccl_sys::config::StatusPlace;
use tinynccl_sys::secret;

/// Returns the folder of the sockets; `None` where the setting turns them off.
pub fn folder(place: &StatusPlace) -> Option<PathBuf> {
    match place {
        StatusPlace::Off => None,
        StatusPlace::Folder(folder) => Some(PathBuf::from(folder)),
        StatusPlace::Auto => {
            let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir());
            let uid = rustix::process::geteuid().as_raw();
            Some(given.map_or_else(|| format!("/tmp/tinynccl-{uid}").into(), |folder| folder.join("tinynccl")))
        }
    }
}

/// Returns the folders in which processes of our user may have their sockets: the variable need not be set for all.
pub fn folders(place: &StatusPlace) -> Vec<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let mut all: Vec<PathBuf> = folder(place).into_iter().collect();
    if *place == StatusPlace::Auto {
        all.extend([format!("/run/user/{uid}/tinynccl").into(), format!("/tmp/tinynccl-{uid}").into()]);
        all.sort_unstable();
        all.dedup();
    }
    all
}

/// Checks that only our user can put sockets into the folder.
///
/// # Errors
/// It is no folder, or another user can write into it: its sockets may be anybody's.
pub(crate) fn check(folder: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(folder)?;
    let ours = rustix::process::geteuid().as_raw();
    if found.is_dir() && found.uid() == ours && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{}: expected a folder of user {ours} that no other user can write to, got one of user {} with mode {:o}",
        folder.display(),
        found.uid(),
        found.mode() & 0o7777
    )))
}

/// Makes the folder, for our user alone, and a path in it for a socket of this process.
pub(crate) fn prepare(folder: &Path) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    check(folder)?;
    // Processes in separate namespaces of process ids may share the folder.
    let random: [u8; 4] = secret::random().map_err(io::Error::other)?;
    Ok(folder.join(format!("{}-{:08x}.sock", std::process::id(), u32::from_le_bytes(random))))
}

/// Returns the sockets in the folder, with the process that each belongs to.
///
/// # Errors
/// As [`check`]; none if there is no folder.
pub(crate) fn sockets(folder: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    match check(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        checked => checked?,
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some((pid, rest)) = name.to_str().and_then(|name| name.split_once('-')) else { continue };
        let Ok(pid) = pid.parse() else { continue };
        if rest.ends_with(".sock") && entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            found.push((pid, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Removes the sockets that no process listens at any more: those of processes that were killed.
pub(crate) fn sweep(folder: &Path) {
    for (_, path) in sockets(folder).unwrap_or_default() {
        if UnixStream::connect(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("sockets");
        let socket = prepare(&place).unwrap();
        assert_eq!(std::fs::metadata(&place).unwrap().mode() & 0o777, 0o700);
        assert!(socket.to_str().unwrap().contains(&format!("/{}-", std::process::id())));
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o770)).unwrap();
        let text = prepare(&place).unwrap_err().to_string();
        assert!(text.contains("no other user can write to") && text.contains("770"), "{text}");
        assert!(sockets(&place).is_err());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(check(&link).is_err(), "a link may lead anywhere");
        assert_eq!(sockets(&folder.path().join("none")).unwrap(), []);
    }

    #[test]
    fn sockets_of_processes_that_are_gone_are_swept_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("sockets");
        let (gone, lives) = (prepare(&place).unwrap(), prepare(&place).unwrap());
        drop(UnixListener::bind(&gone).unwrap());
        let _listener = UnixListener::bind(&lives).unwrap();
        std::fs::write(place.join("4711-notes.txt"), "mine").unwrap();
        assert_eq!(sockets(&place).unwrap().len(), 2);
        sweep(&place);
        assert_eq!(sockets(&place).unwrap(), [(std::process::id(), lives)]);
        assert!(place.join("4711-notes.txt").exists());
    }

    #[test]
    fn a_setting_names_the_folder_or_none() {
        assert_eq!(folder(&StatusPlace::Off), None);
        assert_eq!(folder(&StatusPlace::Folder("/a/b".into())), Some("/a/b".into()));
        let own = folder(&StatusPlace::Auto).unwrap();
        assert!(own.to_str().unwrap().contains("tinynccl") && folders(&StatusPlace::Auto).contains(&own));
        assert_eq!(folders(&StatusPlace::Folder("/a/b".into())), [PathBuf::from("/a/b")]);
    }
}
