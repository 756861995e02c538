//! The start of a communicator: the ranks compare their settings and agree on one cost model.
//!
//! ```text
//! every rank    settings, whom it shares memory with ──┐                       ┌── all of it: compare, place
//! rank 0        the same, and a model if it has one ───┴── one exchange ───────┤
//!                                                                              └── no model: rank 0 measures with
//!                                                       a second exchange           one peer per kind of link
//! ```
//! Rank 0 alone decides where the figures come from and takes part in every measurement, so all ranks have the same ones.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::state::{State, lock};
use super::{Comm, agree, probe};
use crate::config::Tune;
use crate::error::{Error, Result};
use crate::topology::host::{Host, cores};
use crate::topology::store::{Key, Store, hex};
use crate::topology::{CostModel, Placement};

/// Longest time to measure for; the answer is told to the other ranks in what is left of 50 ms.
const BUDGET: Duration = Duration::from_millis(40);

/// Where a cost model comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Figures in the library, for the number of ranks and cores of rank 0's host.
    BuiltIn,
    /// A file that an earlier run wrote.
    Cached,
    /// Measured at the start.
    Measured,
}

/// How the cost model came about.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// Where the figures come from.
    pub source: Source,
    /// Messages that this rank sent and received to measure.
    pub messages: u64,
    /// Time that measuring took on this rank.
    pub took: Duration,
    /// Rank 0's file, if the model was read from or written to one.
    pub file: Option<PathBuf>,
}

/// A model, where it comes from, and which ranks share memory.
#[derive(Debug, Clone)]
pub(super) struct Tuned {
    pub(super) model: CostModel,
    pub(super) tuning: Tuning,
    /// Equal for ranks that share memory.
    labels: Vec<usize>,
}

impl Tuned {
    /// Built-in figures, as this rank sees the world; [`start`] replaces them.
    pub(super) fn built_in(state: &State) -> Tuned {
        let (ranks, cores) = crowd(state);
        let labels = state.members.iter().map(|&m| if state.control.shares_memory(m) { 0 } else { m + 1 }).collect();
        let model = CostModel { caches: Host::here().caches, ..CostModel::shm() }.on_cores(ranks, cores);
        let tuning = Tuning { source: Source::BuiltIn, messages: 0, took: Duration::ZERO, file: None };
        Tuned { model, tuning, labels }.placed()
    }

    /// The same figures for some of the ranks. Those of a host still share its cores with all the others.
    pub(super) fn among(&self, ranks: impl Iterator<Item = usize>) -> Tuned {
        let labels = ranks.filter_map(|r| self.labels.get(r).copied()).collect();
        Tuned { labels, ..self.clone() }.placed()
    }

    fn placed(self) -> Tuned {
        Tuned { model: self.model.placed(Placement::of(&self.labels)), ..self }
    }
}

/// Ranks on this host, and its cores.
pub(super) fn crowd(state: &State) -> (usize, usize) {
    (state.members.iter().filter(|&&m| state.control.shares_host(m)).count(), cores())
}

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct Arrival {
    /// Values of the settings that must agree.
    settings: Vec<String>,
    /// The lowest rank that it shares memory with.
    label: usize,
    /// Rank 0's: a model that need not be measured.
    offer: Option<Offer>,
}

#[derive(Serialize, Deserialize)]
struct Offer {
    source: Source,
    model: CostModel,
    file: Option<PathBuf>,
}

/// Compares settings and agrees on a cost model. Every rank calls it once, before any other call.
///
/// # Errors
/// [`Error::Config`], on every rank, when a setting differs that must not.
pub(super) fn start(comm: &Comm) -> Result<()> {
    let state = &comm.inner.state;
    if comm.size() == 1 || state.control.one_process() {
        return Ok(());
    }
    let (rank, size) = (comm.rank(), comm.size());
    let label = (0..size).find(|&r| state.control.shares_memory(state.members[r])).unwrap_or(rank);
    let place = if rank == 0 { Place::find(comm) } else { None };
    let offer = if rank == 0 { offer(comm, place.as_ref()) } else { None };
    let arrivals: Vec<Arrival> =
        exchange(comm, "start", &Arrival { settings: agree::values(&state.config), label, offer })?;
    let settings: Vec<&[String]> = arrivals.iter().map(|a| a.settings.as_slice()).collect();
    agree::check(&settings, rank)?;
    let labels: Vec<usize> = arrivals.iter().map(|a| a.label).collect();
    let offer = arrivals.into_iter().next().and_then(|a| a.offer);
    let (offer, messages, took) = match offer {
        Some(offer) => (offer, 0, Duration::ZERO),
        None => measure(comm, &labels, place)?,
    };
    let tuning = Tuning { source: offer.source, messages, took, file: offer.file };
    log::debug!("rank {rank}: cost model: {tuning:?}, {}", offer.model.to_json());
    lock(&comm.inner.engine).tuned = Tuned { model: offer.model, tuning, labels }.placed();
    Ok(())
}

/// What rank 0 has without measuring.
fn offer(comm: &Comm, place: Option<&Place>) -> Option<Offer> {
    let engine = lock(&comm.inner.engine);
    let built_in = &engine.tuned.model;
    // Ranks that take turns on a core would measure the scheduler: the built-in figures say as much.
    let tune = if built_in.ranks_per_core > 1.0 { Tune::Off } else { comm.config().tune };
    match tune {
        Tune::Off => Some(Offer { source: Source::BuiltIn, model: built_in.clone(), file: None }),
        Tune::Cached => place.and_then(|Place { store, key }| {
            let model = store.load(key)?;
            Some(Offer { source: Source::Cached, model, file: Some(store.path(key)) })
        }),
        Tune::Measure => None,
    }
}

/// Measures on rank 0 and one peer per kind of link, and tells everybody.
fn measure(comm: &Comm, labels: &[usize], place: Option<Place>) -> Result<(Offer, u64, Duration)> {
    let started = Instant::now();
    let peers = probe::Peers::of(labels);
    let mut messages = 0;
    let mut found = None;
    if comm.rank() == 0 {
        let report = probe::lead(comm, &peers, started + BUDGET)?;
        messages = report.messages;
        found = Some(report);
    } else if peers.include(comm.rank()) {
        messages = probe::follow(comm)?;
    }
    let offer = found.as_ref().map(|report| {
        // What a busy machine disturbed is used, but not kept for later.
        let file = place.as_ref().filter(|_| report.steady).map(|p| p.store.path(&p.key));
        Offer { source: Source::Measured, model: report.model.clone(), file }
    });
    let offers: Vec<Option<Offer>> = exchange(comm, "cost-model", &offer)?;
    let took = started.elapsed();
    let offer = offers
        .into_iter()
        .next()
        .flatten()
        .ok_or_else(|| Error::invalid("start-up measurement", "rank 0 sent no cost model"))?;
    offer.model.check().map_err(|detail| Error::invalid("cost model", detail))?;
    if let (Some(Place { store, key }), Some(_)) = (&place, &offer.file) {
        store.save(key, &offer.model);
    }
    Ok((offer, messages, took))
}

/// Every member's value.
fn exchange<T: Serialize + for<'a> Deserialize<'a>>(comm: &Comm, what: &str, value: &T) -> Result<Vec<T>> {
    let state = &comm.inner.state;
    let broken = |e: serde_json::Error| {
        Error::invalid(what, format!("does not parse ({e}): do all ranks run the same version?"))
    };
    let bytes = serde_json::to_vec(value).map_err(broken)?;
    let values = state.control.exchange(&format!("{what}-{}", state.id), &state.members, bytes)?;
    values.iter().map(|bytes| serde_json::from_slice(bytes).map_err(broken)).collect()
}

/// Where a measured model is kept.
struct Place {
    store: Store,
    key: Key,
}

impl Place {
    fn find(comm: &Comm) -> Option<Place> {
        let state = &comm.inner.state;
        let config = &state.config;
        if config.tune == Tune::Off {
            return None;
        }
        let store = Store::locate(config.tune_cache.as_deref(), |name| std::env::var_os(name))?;
        let mut others: Vec<String> = (state.members.iter())
            .filter(|&&m| !state.control.shares_host(m))
            .map(|&m| state.control.hostname(m))
            .collect();
        others.sort_unstable();
        others.dedup();
        let shares = |&m: &usize| state.control.shares_memory(m);
        let kinds = [("shm", state.members.iter().skip(1).any(shares)), ("tcp", !state.members.iter().all(shares))];
        let key = Key {
            library: env!("CARGO_PKG_VERSION").to_owned(),
            optimised: !cfg!(debug_assertions),
            host: Host::here(),
            others: if others.is_empty() { String::new() } else { hex(others.join(" ").as_bytes()) },
            links: kinds.iter().filter(|(_, used)| *used).map(|(kind, _)| (*kind).to_owned()).collect(),
            ranks_per_host: crowd(state).0,
            message: comm.inner.options.max_message,
            depth: comm.inner.options.depth,
            checksum: config.checksum,
            socket_buffer: config.socket_buffer,
            spin_ns: u64::try_from(config.spin.as_nanos()).unwrap_or(u64::MAX),
        };
        Some(Place { store, key })
    }
}
