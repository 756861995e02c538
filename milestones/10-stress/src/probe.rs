//! The distance between the cores of two ranks: the round-trip time of a cache line.
//!
//! The host of a virtual machine may move its cores, and small messages then take two to four times as long. So when
//! programs are compared (`scripts/compare-peers`), each repetition runs between two probes.

use std::fs::File;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use tinynccl::Comm;

/// Cores with a round trip of more than this many nanoseconds are far from each other.
const FAR: f64 = 200.0;
/// Round trips of a batch, and batches.
const TRIPS: u32 = 25;
const BATCHES: u32 = 4;
const BYTES: usize = 4096;
/// Polls for the other rank's answer before a batch is given up. That rank has died, which the next call will report.
const MOST_TURNS: u64 = 100_000_000;

/// The environment variable that names the file.
const VARIABLE: &str = "PERF_PROBE";

thread_local! {
    /// This rank's probe.
    static PROBE: std::cell::RefCell<Option<Probe>> = const { std::cell::RefCell::new(None) };
}

/// Opens the probe if the environment names one.
pub(crate) fn open(comm: &Comm) -> Result<()> {
    if let Some(file) = std::env::var_os(VARIABLE) {
        let probe = Probe::open(Path::new(&file), comm)?;
        PROBE.with(|slot| *slot.borrow_mut() = probe);
    }
    Ok(())
}

/// Returns true if the two ranks' cores are far from each other now; `false` without a probe.
pub(crate) fn is_far() -> bool {
    PROBE.with(|probe| probe.borrow().as_ref().is_some_and(|probe| probe.round_trip() > FAR))
}

/// A page that two ranks map.
#[derive(Debug)]
struct Probe {
    page: NonNull<AtomicU32>,
    rank: usize,
    trip: std::cell::Cell<u32>,
}

impl Probe {
    /// Maps `file`, which must have a page. `None` unless there are two ranks.
    fn open(file: &Path, comm: &Comm) -> Result<Option<Probe>> {
        if comm.size() != 2 {
            return Ok(None);
        }
        let context = || format!("the probe's file {}", file.display());
        let fd = File::options().read(true).write(true).open(file).with_context(context)?;
        anyhow::ensure!(fd.metadata()?.len() >= BYTES as u64, "{}: expected {BYTES} bytes", context());
        // SAFETY: a new mapping at an address the kernel chooses touches no memory in use.
        let page =
            unsafe { mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) };
        let page = NonNull::new(page.with_context(context)?.cast()).with_context(context)?;
        let probe = Probe { page, rank: comm.rank(), trip: std::cell::Cell::new(0) };
        probe.line(probe.rank).store(0, Ordering::Release);
        comm.barrier()?;
        Ok(Some(probe))
    }

    fn line(&self, rank: usize) -> &AtomicU32 {
        // SAFETY: two words 256 bytes apart in our page, which stays mapped; atomics may be shared with anyone.
        unsafe { self.page.add(64 * rank).as_ref() }
    }

    /// Nanoseconds of a round trip: the fastest of a few batches. Both ranks call it.
    fn round_trip(&self) -> f64 {
        let mut best = f64::INFINITY;
        for _ in 0..BATCHES {
            let start = Instant::now();
            for _ in 0..TRIPS {
                let trip = self.trip.get() + 1;
                self.trip.set(trip);
                if self.rank == 0 {
                    self.line(0).store(trip, Ordering::Release);
                }
                let mut turns = 0;
                while self.line(1 - self.rank).load(Ordering::Acquire) != trip && turns < MOST_TURNS {
                    turns += 1;
                }
                if self.rank == 1 {
                    self.line(1).store(trip, Ordering::Release);
                }
            }
            best = best.min(start.elapsed().as_nanos() as f64 / f64::from(TRIPS));
        }
        best
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `open`; borrows of it ended before.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), BYTES) };
    }
}
