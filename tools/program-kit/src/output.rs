//! A file that a program writes at its end.

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use tempfile::NamedTempFile;

/// A file that appears under its name only when it is complete. It is opened at the start, so that a path that cannot
/// be written fails before the work and not after it.
#[derive(Debug)]
pub struct Output {
    file: NamedTempFile,
    path: PathBuf,
}

impl Output {
    /// Opens a file beside `path` and creates missing directories.
    ///
    /// # Errors
    /// It cannot be written there.
    pub fn create(path: &Path) -> Result<Output> {
        let words = || format!("cannot write {}", path.display());
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(folder).with_context(words)?;
        if path.is_dir() {
            bail!("{}: it is a directory", words());
        }
        // As readable as other files.
        let readable = Permissions::from_mode(0o666);
        let file = tempfile::Builder::new().permissions(readable).tempfile_in(folder).with_context(words)?;
        Ok(Output { file, path: path.to_owned() })
    }

    /// Writes everything and renames the file to its final name.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub fn finish(mut self, contents: &[u8]) -> Result<()> {
        let words = || format!("cannot write {}", self.path.display());
        self.file.write_all(contents).with_context(words)?;
        self.file.persist(&self.path).with_context(words)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_appear_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/a.json");
        let output = Output::create(&path).unwrap();
        assert!(!path.exists());
        output.finish(b"{}").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"{}");
        drop(Output::create(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"{}", "given up: the old file stays");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left behind");
        let error = Output::create(Path::new("/proc/none/a.json")).unwrap_err();
        assert!(format!("{error:#}").starts_with("cannot write /proc/none/a.json: "), "{error:#}");
        assert!(Output::create(directory.path()).is_err());
    }
}
