//! The start of a communicator: the ranks compare their settings and agree on one cost model.
//!
//! ```text
//! every rank    settings, whom it shares memory with ──┐                       ┌── all of it: compare, place
//! rank 0        the same, and a model if it has one ───┴── one exchange ───────┤
//!                                                                              └── no model: rank 0 measures with
//!                                                       a second exchange           one peer per kind of link
//! ```
//! Rank 0 alone decides where the figures come from and takes part in every measurement, so all ranks have the same
//! ones.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::agree;
use super::probe;
use crate::Comm;
use crate::engine::described::{self, Described, Given};
use crate::engine::tuned::{Seat, Source, Tuned, Tuning};
use crate::topology::CostModel;
use crate::topology::host::{Cores, Host};
use crate::topology::store::{Key, Store, hex};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, TransportChoice, Tune};
use tinynccl_sys::threads::lock;

/// No measurement is begun that would not end by then; the rest of the 50 ms is for sending the result to the other
/// ranks. A call that has begun is awaited, however long other programs keep the peer off its core.
const BUDGET: Duration = Duration::from_millis(35);

/// A rank's message to the others.
#[derive(Serialize, Deserialize)]
struct Arrival {
    /// Values of the settings that must agree.
    settings: Vec<String>,
    /// The lowest rank that it shares memory with.
    memory: usize,
    /// The lowest rank on its machine.
    host: usize,
    cores: Cores,
    /// Rank 0's.
    figures: Option<Figures>,
}

/// Rank 0's model without measuring.
#[derive(Serialize, Deserialize)]
struct Figures {
    built_in: CostModel,
    cached: Option<(CostModel, PathBuf)>,
    /// Only this source is allowed.
    measure: bool,
    /// Description of the machine, if one is wanted.
    machine: Option<Given>,
}

/// The description that the settings name.
fn description(config: &Config) -> Option<Given> {
    config.topology.as_deref().map(Given::read)
}

/// The machine to pack trees for. Ranks that are all in one place need none: what they do in shared memory is faster.
fn described(comm: &Comm, machine: Option<Given>) -> Result<Option<Described>> {
    // The file is rank 0's; others may not have its name.
    let path = comm.config().topology.as_deref().unwrap_or("rank 0's");
    let wrong = |detail| Error::Config { name: described::SETTING.to_owned(), value: path.to_owned(), detail };
    let described = |description: &_| Described::new(description, path, comm.size()).map(Some);
    match machine {
        None => Ok(None),
        Some(Given::File(file)) => described(&file.map_err(wrong)?),
        Some(Given::OfHost(description)) => match described(&description) {
            Err(error) => {
                log::info!("rank {}: {error}; it describes one host, and is not used", comm.rank());
                Ok(None)
            }
            fits => fits,
        },
        Some(Given::Discover) => {
            let description = comm.discover()?;
            let places = description.node.iter().filter(|node| node.ranks > 0).count();
            if places > 1 { described(&description) } else { Ok(None) }
        }
    }
}

/// Compares settings and agrees on a cost model. Every rank calls it once, before any other call.
///
/// # Errors
/// [`Error::Config`], on every rank, when a setting differs that must be equal.
pub(super) fn start(comm: &Comm) -> Result<()> {
    if comm.size() == 1 {
        return Ok(());
    }
    if comm.inner.state.control.one_process() {
        // Threads are in one place. One thread makes all their communicators, so nothing is exchanged here.
        let given = description(comm.config()).filter(|given| !matches!(given, Given::Discover));
        let machine = described(comm, given)?;
        lock(&comm.inner.engine).tuned.described = machine;
        return Ok(());
    }
    let place = if comm.rank() == 0 { Place::find(comm) } else { None };
    let machine = (comm.rank() == 0).then(|| description(comm.config())).flatten();
    agree_on_model(comm, place, comm.config().tune != Tune::Off, machine)
}

/// [`start`] for a group with newcomers: rank 0's model, which it has from before, is everyone's. Measures nothing.
pub(super) fn take_over(comm: &Comm) -> Result<()> {
    agree_on_model(comm, None, false, None)
}

/// `place`, `may_measure` and `machine` are rank 0's: where to find figures, whether to measure them where there are
/// none, and the description of the machine.
fn agree_on_model(comm: &Comm, place: Option<Place>, may_measure: bool, machine: Option<Given>) -> Result<()> {
    let state = &comm.inner.state;
    let (rank, size) = (comm.rank(), comm.size());
    let first = |shares: &dyn Fn(usize) -> bool| (0..size).find(|&r| shares(state.members[r])).unwrap_or(rank);
    let arrival = Arrival {
        settings: agree::values(&state.config),
        memory: first(&|member| state.control.shares_memory(member)),
        host: first(&|member| state.control.shares_host(member)),
        cores: Cores::here(),
        figures: (rank == 0).then(|| figures(comm, place.as_ref(), may_measure, machine)),
    };
    let arrivals: Vec<Arrival> = comm.exchange("start", &arrival)?;
    let settings: Vec<&[String]> = arrivals.iter().map(|a| a.settings.as_slice()).collect();
    agree::check(&settings, rank)?;
    let cores = |host: usize| Cores::together(arrivals.iter().filter(|a| a.host == host).map(|a| &a.cores));
    let seats: Vec<Seat> =
        arrivals.iter().map(|a| Seat { memory: a.memory, host: a.host, cores: cores(a.host) }).collect();
    let Some(figures) = arrivals.into_iter().next().and_then(|a| a.figures) else {
        return Err(Error::invalid("start-up", "rank 0 sent no cost model"));
    };
    let tuning = Tuning { source: Source::BuiltIn, messages: 0, took: Duration::ZERO, file: None };
    let mut tuned = Tuned::new(figures.built_in, tuning, seats);
    let given = figures.machine;
    // All ranks come to the same conclusion. Ranks that share a core would measure the scheduler: the built-in
    // figures say as much.
    if !tuned.is_oversubscribed(0) {
        if let Some((model, file)) = figures.cached {
            let tuning = Tuning { source: Source::Cached, file: Some(file), ..tuned.tuning };
            tuned = Tuned::new(model, tuning, tuned.seats);
        } else if figures.measure {
            let seats = tuned.seats.clone();
            adopt(comm, tuned);
            let (model, tuning) = measure(comm, &seats, place)?;
            tuned = Tuned::new(model, tuning, seats);
        }
    }
    log::debug!(
        "rank {rank}: cost model: {:?}, {}",
        tuned.tuning,
        serde_json::to_string(&tuned.model).unwrap_or_default()
    );
    adopt(comm, tuned);
    let machine = described(comm, given)?;
    let mut engine = lock(&comm.inner.engine);
    engine.tuned.described = machine;
    engine.forget_routes();
    Ok(())
}

fn adopt(comm: &Comm, tuned: Tuned) {
    comm.inner.oversubscribed.store(tuned.is_oversubscribed(comm.rank()), Ordering::Relaxed);
    comm.inner.state.control.zero_copy_from(tuned.model.zero_copy_from.unwrap_or(usize::MAX));
    let mut engine = lock(&comm.inner.engine);
    engine.tuned = tuned.relayed(&comm.inner.state);
    engine.forget_routes();
}

fn figures(comm: &Comm, place: Option<&Place>, measure: bool, machine: Option<Given>) -> Figures {
    let tune = comm.config().tune;
    let cached = place.filter(|_| tune == Tune::Cached).and_then(|Place { store, key }| {
        let model = store.load(key)?;
        Some((model, store.path(key)))
    });
    let built_in = lock(&comm.inner.engine).tuned.model.clone();
    Figures { built_in, cached, measure, machine }
}

/// Measures on rank 0 and one peer per kind of link, and sends the result to all ranks.
fn measure(comm: &Comm, seats: &[Seat], place: Option<Place>) -> Result<(CostModel, Tuning)> {
    let started = Instant::now();
    let labels: Vec<usize> = seats.iter().map(|s| s.memory).collect();
    let relays = lock(&comm.inner.engine).tuned.model.relays.clone();
    let peers = probe::Peers::of(&labels, &relays);
    let mut messages = 0;
    let mut found = None;
    if comm.rank() == 0 {
        let report = probe::lead(comm, &peers, started + BUDGET)?;
        messages = report.messages;
        // Figures that a busy machine disturbed are used, but not stored.
        let file = place.as_ref().filter(|_| report.steady).map(|p| p.store.path(&p.key));
        found = Some((report.model, file));
    } else if peers.include(comm.rank()) {
        messages = probe::follow(comm, 0)?;
    }
    let answers: Vec<Option<(CostModel, Option<PathBuf>)>> = comm.exchange("cost-model", &found)?;
    let took = started.elapsed();
    let Some((model, file)) = answers.into_iter().next().flatten() else {
        return Err(Error::invalid("start-up measurement", "rank 0 sent no cost model"));
    };
    model.check().map_err(|detail| Error::invalid("cost model", detail))?;
    if let (Some(Place { store, key }), Some(_)) = (&place, &file) {
        store.save(key, &model);
    }
    Ok((model, Tuning { source: Source::Measured, messages, took, file }))
}

/// Kinds of links in use: through memory, over a network.
fn links(config: &Config, memory: bool, network: bool) -> Vec<String> {
    let over_network = match (config.transport, config.verbs_qps, config.tcp_streams) {
        (TransportChoice::Verbs, 1, _) => "verbs".to_owned(),
        (TransportChoice::Verbs, qps, _) => format!("verbs, {qps} queue pairs"),
        _ if config.tcp_rails => "rails".to_owned(),
        (_, _, 1) => "tcp".to_owned(),
        (_, _, streams) => format!("tcp, {streams} streams"),
    };
    memory.then(|| "shm".to_owned()).into_iter().chain(network.then_some(over_network)).collect()
}

/// Location of a measured model: the store and the key in it.
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
        let (some, all) = (state.members.iter().skip(1).any(shares), state.members.iter().all(shares));
        let key = Key {
            library: env!("CARGO_PKG_VERSION").to_owned(),
            optimised: !cfg!(debug_assertions),
            host: Host::here(),
            others: if others.is_empty() { String::new() } else { hex(others.join(" ").as_bytes()) },
            links: links(config, some, !all),
            ranks_per_host: state.members.iter().filter(|&&m| state.control.shares_host(m)).count(),
            message: comm.inner.options.max_message,
            depth: comm.inner.options.depth,
            verify: config.verify.to_string(),
            socket_buffer: config.socket_buffer,
            spin_ns: u64::try_from(config.spin.as_nanos()).unwrap_or(u64::MAX),
        };
        Some(Place { store, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_other_links_are_kept_apart() {
        let tcp = Config::default();
        let verbs = Config::default().with(|c| c.transport = TransportChoice::Verbs);
        assert_eq!(links(&tcp, true, true), ["shm", "tcp"]);
        assert_eq!(links(&tcp, true, false), ["shm"]);
        assert_eq!(links(&verbs, false, true), ["verbs"]);
        assert_eq!(links(&verbs.clone().with(|c| c.verbs_qps = 2), false, true), ["verbs, 2 queue pairs"]);
        assert_eq!(links(&Config::default().with(|c| c.tcp_rails = true), true, true), ["shm", "rails"]);
        assert_eq!(links(&tcp.clone().with(|c| c.tcp_streams = 4), false, true), ["tcp, 4 streams"]);
    }
}
