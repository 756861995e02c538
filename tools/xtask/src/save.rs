//! Waits until a learner saves a file.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Result;

use crate::files;

/// Time between two looks at the files.
const TICK: Duration = Duration::from_millis(200);

/// The files of a folder with their times and lengths: equal until one is saved, added or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved(Vec<(PathBuf, Option<(SystemTime, u64)>)>);

impl Saved {
    /// Looks at the files now.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn now(folder: &Path) -> Result<Saved> {
        let look = |file: PathBuf| {
            // An editor may be replacing it at this moment.
            let data = std::fs::metadata(folder.join(&file)).ok();
            let seen = data.and_then(|d| Some((d.modified().ok()?, d.len())));
            (file, seen)
        };
        Ok(Saved(files::list(folder)?.into_iter().map(look).collect()))
    }

    /// Returns when `folder` is no longer as it was.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn wait(&self, folder: &Path) -> Result<()> {
        while Saved::now(folder)? == *self {
            std::thread::sleep(TICK);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_added_or_removed_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let now = || Saved::now(folder.path()).unwrap();
        std::fs::write(at("a.rs"), "one").unwrap();
        let first = now();
        assert_eq!(first, now());
        std::fs::write(at("a.rs"), "three").unwrap();
        let second = now();
        assert_ne!(first, second);
        first.wait(folder.path()).unwrap();
        std::fs::write(at("b.rs"), "").unwrap();
        assert_ne!(second, now());
        std::fs::remove_file(at("b.rs")).unwrap();
        assert_eq!(second, now());
    }
}
