//! The measurement as JSON, with all that a later comparison needs.

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
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
