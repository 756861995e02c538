//! The cost model's figures: built in, or measured when the communicator starts.

use std::time::Instant;

use super::Comm;
use super::state::{State, lock};
use crate::error::{Error, Result};
use crate::topology::{CostModel, fit};

/// Round trips per size; the median counts.
const ROUNDS: usize = 15;
/// Message sizes in bytes; the longest is the communicator's own.
const SIZES: [usize; 3] = [8, 4 << 10, 32 << 10];

/// Figures of a link of the communicator's kind, for as many ranks and cores as this host has.
pub(super) fn built_in(state: &State, shared: bool) -> CostModel {
    let (ranks, cores) = crowd(state);
    if shared { CostModel::shm() } else { CostModel::tcp() }.on_cores(ranks, cores)
}

/// Ranks on this host, and its cores.
pub(super) fn crowd(state: &State) -> (usize, usize) {
    let ranks = state.members.iter().filter(|&&m| state.control.shares_host(m)).count();
    (ranks, std::thread::available_parallelism().map_or(1, usize::from))
}

/// Replaces the built-in figures by measured ones, the same on all ranks: rank 0 measures with one peer, over the
/// slowest kind of link in use, and tells the others. Takes milliseconds.
pub(super) fn measure(comm: &Comm) -> Result<()> {
    let state = &comm.inner.state;
    if comm.size() == 1 || state.control.one_process() {
        return Ok(());
    }
    let mut model = lock(&comm.inner.engine).cost.clone();
    // Ranks that take turns on a core would measure the scheduler: the built-in figures say as much.
    let worth = state.config.tune && model.ranks_per_core <= 1.0;
    let slowest = (1..comm.size()).find(|&r| !state.control.shares_memory(state.members[r])).unwrap_or(1);
    let partner = if worth { slowest.to_string() } else { String::new() };
    let partner: Option<usize> = agree(comm, "partner", partner)?.parse().ok();
    let (rank, peer) = (comm.rank(), partner.unwrap_or(0));
    if partner.is_some() && (rank == 0 || rank == peer) {
        let other = if rank == 0 { peer } else { 0 };
        let mut samples = Vec::new();
        for bytes in SIZES.into_iter().chain([comm.inner.options.max_message]) {
            samples.push((bytes, one_way_ns(comm, other, bytes)?));
        }
        log::debug!("rank {rank}: one way with rank {other}: {samples:?} (bytes, ns)");
        model.link = fit(&samples);
    }
    let text = agree(comm, "cost-model", model.to_json())?;
    lock(&comm.inner.engine).cost = CostModel::from_json(&text)?;
    Ok(())
}

/// Rank 0's `text`, on every rank.
fn agree(comm: &Comm, what: &str, text: String) -> Result<String> {
    let state = &comm.inner.state;
    let values = state.control.exchange(&format!("{what}-{}", state.id), &state.members, text.into_bytes())?;
    let first = values.into_iter().next().unwrap_or_default();
    String::from_utf8(first).map_err(|_| Error::invalid("start-up measurement", format!("rank 0's {what} is not text")))
}

/// Half the median round trip; both ranks call it.
fn one_way_ns(comm: &Comm, other: usize, bytes: usize) -> Result<f64> {
    let mut buffer = vec![0u8; bytes];
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        if comm.rank() == 0 {
            comm.send(&buffer, other)?;
            comm.recv(&mut buffer, other)?;
        } else {
            comm.recv(&mut buffer, other)?;
            comm.send(&buffer, other)?;
        }
        times.push(start.elapsed().as_nanos() as f64 / 2.0);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}
