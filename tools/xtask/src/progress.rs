//! Steps that have passed: a file `progress` in the learner's folder, a line each: `07`, or `05 in part` when something
//! could not be checked where it ran.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The result of a check that passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Passed {
    /// All that can be checked where it ran.
    InPart,
    /// Everything.
    Whole,
}

/// The file, read.
#[derive(Debug, Default)]
pub struct Progress {
    file: PathBuf,
    passed: BTreeMap<u8, Passed>,
}

impl Progress {
    /// Reads the file in `folder`; without one nothing has passed. Lines that are none of ours are left out.
    ///
    /// # Errors
    /// There is a file and it cannot be read.
    pub fn read(folder: &Path) -> Result<Progress> {
        let file = folder.join("progress");
        let text = match std::fs::read_to_string(&file) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other.with_context(|| format!("reading {}", file.display()))?,
        };
        let line = |line: &str| {
            let (number, rest) = line.split_at_checked(2)?;
            let passed = if rest.trim().is_empty() { Passed::Whole } else { Passed::InPart };
            Some((number.parse().ok()?, passed))
        };
        Ok(Progress { file, passed: text.lines().filter_map(line).collect() })
    }

    /// Returns the best result of a step since its last failed check; `None` if no check has passed since.
    pub fn of(&self, number: u8) -> Option<Passed> {
        self.passed.get(&number).copied()
    }

    /// Notes how a check ended: `None` when it failed. What once passed whole stays so when a part cannot be checked.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn note(&mut self, number: u8, passed: Option<Passed>) -> Result<()> {
        match passed.max(self.of(number).filter(|_| passed.is_some())) {
            Some(passed) => self.passed.insert(number, passed),
            None => self.passed.remove(&number),
        };
        let line = |(number, passed): (&u8, &Passed)| {
            format!("{number:02}{}\n", if *passed == Passed::Whole { "" } else { " in part" })
        };
        let text: String = self.passed.iter().map(line).collect();
        std::fs::write(&self.file, text).with_context(|| format!("writing {}", self.file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_there_again_and_a_failure_takes_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let read = || Progress::read(folder.path()).unwrap();
        assert_eq!(read().of(7), None);
        read().note(7, Some(Passed::Whole)).unwrap();
        read().note(5, Some(Passed::InPart)).unwrap();
        assert_eq!((read().of(7), read().of(5), read().of(6)), (Some(Passed::Whole), Some(Passed::InPart), None));
        read().note(5, Some(Passed::Whole)).unwrap();
        read().note(7, Some(Passed::InPart)).unwrap();
        assert_eq!((read().of(7), read().of(5)), (Some(Passed::Whole), Some(Passed::Whole)));
        read().note(7, None).unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("progress")).unwrap(), "05\n");
    }
}
