//! A schedule from a file, as `tinynccl::schedule::Schedule` writes it.

use std::path::Path;

use anyhow::{Context as _, Result};
use tinynccl_plan::schedule::Schedule;
use tinynccl_plan::wire::Algorithm;

/// The executor of a collective: an algorithm of the library, trees packed for the machine, or a schedule of the user.
#[derive(Debug, Clone)]
pub(crate) enum By {
    Library(Algorithm),
    Packed,
    Own(Schedule),
}

impl By {
    pub(crate) fn algorithm(&self) -> Option<Algorithm> {
        match self {
            By::Library(algorithm) => Some(*algorithm),
            By::Packed | By::Own(_) => None,
        }
    }
}

impl std::fmt::Display for By {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            By::Library(algorithm) => algorithm.fmt(f),
            By::Packed => f.write_str("packed trees"),
            By::Own(schedule) => write!(f, "program {:014x}", schedule.fingerprint()),
        }
    }
}

/// Reads and proves it.
pub(crate) fn read(path: &Path) -> Result<Schedule> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    text.parse().with_context(|| path.display().to_string())
}
