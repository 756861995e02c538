//! The measurement as JSON, with all that a later comparison needs.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::case::{Case, Layout};
use crate::row::Measured;

/// A whole run.
#[derive(Debug, Serialize)]
pub(crate) struct Record {
    /// Version of this format.
    pub(crate) format: u32,
    /// UTC, `2026-01-31T12:00:00Z`.
    pub(crate) date: String,
    pub(crate) version: &'static str,
    pub(crate) command: Vec<String>,
    pub(crate) machine: Machine,
    pub(crate) ranks: usize,
    /// Kinds of links that were open at the end, and the number of each.
    pub(crate) links: Vec<(String, usize)>,
    pub(crate) pinned: bool,
    pub(crate) rows: Vec<Row>,
    pub(crate) wrong: Option<u64>,
    pub(crate) average_busbw: f64,
}

/// The machine of rank 0.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) host: String,
    pub(crate) kernel: String,
    pub(crate) processor: String,
    pub(crate) cores: usize,
}

/// One row; times in seconds, bandwidths in GB/s (10^9 bytes).
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) collective: &'static str,
    pub(crate) dtype: &'static str,
    pub(crate) op: Option<&'static str>,
    pub(crate) root: Option<usize>,
    pub(crate) bytes: usize,
    pub(crate) count: usize,
    /// The algorithm that the library chose; none for send/recv.
    pub(crate) algorithm: Option<&'static str>,
    pub(crate) out_of_place: Option<Measured>,
    pub(crate) in_place: Option<Measured>,
}

impl Row {
    pub(crate) fn new(case: &Case, layout: Layout, algorithm: Option<&'static str>) -> Row {
        Row {
            collective: case.name(),
            dtype: case.dtype.name(),
            op: case.op.map(|op| op.name()),
            root: case.root,
            bytes: case.bytes(layout),
            count: layout.count,
            algorithm,
            out_of_place: None,
            in_place: None,
        }
    }
}

impl Machine {
    /// This machine, as far as the kernel describes it.
    pub(crate) fn here() -> Machine {
        let system = rustix::system::uname();
        let text = |s: &std::ffi::CStr| s.to_string_lossy().into_owned();
        let processor = fs::read_to_string("/proc/cpuinfo").ok().and_then(|info| {
            let field = |name: &str| {
                let line =
                    info.lines().find(|line| line.split(':').next().is_some_and(|found| found.trim() == name))?;
                Some(line.split_once(':')?.1.trim())
            };
            // Virtual machines use one name for many processors.
            let numbers = field("cpu family").zip(field("model"));
            let numbers = numbers.map(|(family, model)| format!(", family {family} model {model}")).unwrap_or_default();
            Some(format!("{}{numbers}", field("model name")?))
        });
        Machine {
            host: text(system.nodename()),
            kernel: text(system.release()),
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// Now, as `2026-01-31T12:00:00Z`.
pub(crate) fn now() -> String {
    date(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

/// Seconds since 1970 as a date (civil_from_days of Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms").
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// A file that appears under its name only when it is complete. It is opened at the start, so that a path that cannot
/// be written fails before the measurement and not after it.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    partial: PathBuf,
    path: PathBuf,
}

impl Output {
    /// Opens a file beside `path` and creates missing directories.
    pub(crate) fn create(path: &Path) -> Result<Output> {
        let words = || format!("cannot write {}", path.display());
        if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(parent).with_context(words)?;
        }
        if path.is_dir() {
            anyhow::bail!("{}: it is a directory", words());
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}.part", std::process::id()));
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).with_context(words)?;
        Ok(Output { file, partial, path: path.to_owned() })
    }

    /// Writes everything and renames the file to its final name.
    pub(crate) fn finish(mut self, contents: &[u8]) -> Result<()> {
        let words = || format!("cannot write {}", self.path.display());
        self.file.write_all(contents).with_context(words)?;
        fs::rename(&self.partial, &self.path).with_context(words)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // After `finish` it no longer exists.
        let _ = fs::remove_file(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_735_689_599), "2024-12-31T23:59:59Z");
        assert_eq!(date(4_107_542_400), "2100-03-01T00:00:00Z");
    }

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
