//! Destination of a rank's events, and their clock.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::event::Track;
use super::{ClockOffset, file, now};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_sys::threads::lock;

/// Track numbers of a rank, so that no two ranks use the same: Perfetto finds a thread's name by its number alone.
const TRACKS: u64 = 10_000;
/// Begin of time before the first traced rank's start, in nanoseconds: another host's clock may seem earlier.
const EARLIER: u64 = 1_000_000;

/// Agreement of the ranks of one run: its id, and its zero of time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    id: String,
    /// Zero of the file's clock, in nanoseconds of the first traced rank's.
    zero_ns: u64,
}

impl Run {
    /// A new run, known by a random id.
    pub(crate) fn new() -> Result<Run> {
        let mut bytes = [0u8; 8];
        getrandom(&mut bytes, GetRandomFlags::empty()).map_err(|e| Error::errno("trace", "an id for the run", e))?;
        Ok(Run { id: format!("{:016x}", u64::from_le_bytes(bytes)), zero_ns: now().saturating_sub(EARLIER) })
    }
}

/// Destination of the events of one rank's communicators.
#[derive(Debug)]
pub(crate) struct Sink {
    /// World rank.
    pub(super) rank: usize,
    run: Run,
    host: String,
    /// Path by `TINYNCCL_TRACE`, for this rank.
    path: PathBuf,
    /// `TINYNCCL_TRACE` names a separate file for each rank.
    alone: bool,
    /// File that we write to; not set before it is clear that it belongs to our run.
    target: OnceLock<PathBuf>,
    clock: OnceLock<ClockOffset>,
    pub(super) events: usize,
    tracks: Mutex<HashMap<(u32, Track), u64>>,
}

impl Sink {
    /// A rank's sink, or none where nothing is traced.
    pub(crate) fn new(rank: usize, run: Run, config: &Config) -> Option<Sink> {
        let pattern = config.trace.as_ref()?;
        let path = pattern.replace("%r", &rank.to_string());
        Some(Sink {
            rank,
            run,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            alone: path != *pattern,
            path: path.into(),
            target: OnceLock::new(),
            clock: OnceLock::new(),
            events: config.trace_events,
            tracks: Mutex::default(),
        })
    }

    /// True when no other rank writes to our path.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Starts the file.
    pub(crate) fn create(&self) -> Result<()> {
        self.create_at(self.path.clone())
    }

    fn create_at(&self, path: PathBuf) -> Result<()> {
        let line = json!({
            "ph": "M", "name": "process_name", "pid": self.pid(), "args": {"name": self.process(), "run": self.run.id},
        });
        file::create(&path, &line.to_string())?;
        // Set once: only the start comes here, and only one rank's.
        let _ = self.target.set(path);
        Ok(())
    }

    /// Joins the file that another rank has started; `false` if it is not there.
    pub(crate) fn join(&self) -> bool {
        if self.target.get().is_none() && file::belongs_to(&self.path, &self.run.id) {
            let _ = self.target.set(self.path.clone());
        }
        self.target.get().is_some()
    }

    /// Starts a file of our own beside the one that we do not share.
    pub(crate) fn create_own(&self) -> Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".rank{}", self.rank));
        let path = PathBuf::from(name);
        log::warn!(
            "rank {}: no other rank's trace is at {}: writing to {}; both can be opened together after `jq -s add`",
            self.rank,
            self.path.display(),
            path.display()
        );
        self.create_at(path)
    }

    /// Sets what to add to our clock.
    pub(crate) fn set_clock(&self, offset: ClockOffset) {
        let _ = self.clock.set(offset);
    }

    pub(super) fn clock(&self) -> ClockOffset {
        self.clock.get().copied().unwrap_or_default()
    }

    /// Our time as the file's, in nanoseconds.
    pub(super) fn time(&self, ns: u64) -> i64 {
        ns as i64 + self.clock().ns - self.run.zero_ns as i64
    }

    /// The file to write to; `None` before the start is over.
    pub(super) fn target(&self) -> Option<&PathBuf> {
        self.target.get()
    }

    /// The rank's process number in the file. Not the rank itself: 0 is the idle task to Perfetto.
    pub(super) fn pid(&self) -> usize {
        self.rank + 1
    }

    /// Description of the rank, for people.
    pub(super) fn process(&self) -> String {
        format!("rank {} ({}, pid {})", self.rank, self.host, std::process::id())
    }

    /// The number of a communicator's track.
    pub(super) fn tid(&self, comm: u32, track: Track) -> u64 {
        let mut tracks = lock(&self.tracks);
        let next = tracks.len() as u64;
        self.pid() as u64 * TRACKS + *tracks.entry((comm, track)).or_insert(next)
    }
}
