//! The measurement as JSON, with all that a later comparison needs.

use std::time::{SystemTime, UNIX_EPOCH};

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
        Machine {
            host: text(system.nodename()),
            kernel: text(system.release()),
            processor: program_kit::machine::processor(),
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
}
