//! A schedule from a file: as `tinynccl::schedule::Schedule` writes it, MSCCL's XML, or an execution plan of mscclpp.

#[cfg(feature = "doctor")]
pub(crate) mod run;

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

/// Reads and proves it. The text itself says which of the formats it has.
pub(crate) fn read(path: &Path) -> Result<Schedule> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let schedule = match text.trim_start_matches('\u{feff}').trim_start().chars().next() {
        Some('<') => Schedule::from_msccl(&text),
        Some('{') => Schedule::from_mscclpp(&text),
        _ => text.parse(),
    };
    schedule.with_context(|| path.display().to_string())
}
