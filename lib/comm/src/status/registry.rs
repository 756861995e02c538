//! Content of this process's report: its communicators, its starts, its events.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::report::{Event, Job, Report, Start, VERSION};
use super::serve::{self, Server, Source};
use super::{member, place, record};
use crate::executor::Supervisor as _;
use crate::state::State;
use crate::state::failure::Recorder;
use tinynccl_plan::Error;
use tinynccl_sys::config::Config;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;
use tinynccl_transport::bootstrap::Host;

/// Events that are kept.
const EVENTS: usize = 64;

/// Everything that a report shows. Its lock is held briefly and never while waiting.
struct Registry {
    /// A forked child has nothing to report of its parent's.
    origin: Origin,
    states: Vec<Weak<State>>,
    starts: Vec<(u64, Waiting)>,
    next_start: u64,
    events: VecDeque<Event>,
    server: Option<Server>,
}

/// A rank at a rendezvous.
struct Waiting {
    store: String,
    rank: usize,
    size: usize,
    since: Instant,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// Runs `change` on the registry of this process, and then ends the server if nothing is left to report.
fn with<R>(change: impl FnOnce(&mut Registry) -> R) -> R {
    let mut slot = lock(&REGISTRY);
    if let Some(former) = slot.take_if(|registry| !registry.origin.is_here()) {
        // A parent's: its thread and its socket are not ours.
        std::mem::forget(former);
    }
    let registry = slot.get_or_insert_with(|| Registry {
        origin: Origin::here(),
        states: Vec::new(),
        starts: Vec::new(),
        next_start: 0,
        events: VecDeque::new(),
        server: None,
    });
    let result = change(registry);
    let idle = registry.states.is_empty() && registry.starts.is_empty();
    let ended = registry.server.take_if(|_| idle);
    drop(slot);
    drop(ended);
    result
}

impl Registry {
    fn serve(&mut self, config: &Config) {
        if let Some(server) = &self.server {
            return server.wake();
        }
        let source = Source { look, report, write, write_pending };
        let started = place::folder(&config.status).map(|folder| Server::start(&folder, config.heartbeat, source));
        // A program runs without it as well.
        let unseen = |e: &Error| log::warn!("tinynccl-cli status will not see this process: {e}");
        self.server = started.and_then(|server| server.inspect_err(unseen).ok());
    }

    fn happened(&mut self, text: String) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        self.events.push_back(Event { at_ms, text });
    }
}

/// A communicator's entry, for as long as the communicator lives.
pub(crate) struct Listed(Arc<State>);

impl Listed {
    /// Enters a communicator, unless its settings keep it out.
    pub(crate) fn new(state: &Arc<State>) -> Option<Listed> {
        place::folder(&state.config.status)?;
        if state.config.dump.is_some() {
            state.record_by(Recorder { write: failed, wake: Listed::wake });
            serve::take_signal();
        }
        with(|registry| {
            registry.states.push(Arc::downgrade(state));
            registry.happened(format!("{} was made", name(state)));
            registry.serve(&state.config);
        });
        Some(Listed(state.clone()))
    }

    /// Makes the status thread look at what was added.
    pub(crate) fn wake() {
        with(|registry| registry.server.iter().for_each(Server::wake));
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if !self.0.origin.is_here() {
            return;
        }
        // The program may end next.
        self.0.record();
        let failure = self.0.first_failure().map_or_else(String::new, |error| format!(" after it failed: {error}"));
        with(|registry| {
            registry.states.retain(|state| !std::ptr::eq(state.as_ptr(), Arc::as_ptr(&self.0)));
            registry.happened(format!("{} ended{failure}", name(&self.0)));
        });
    }
}

/// A start's entry, until the ranks have met.
pub(crate) struct Starting(Option<(u64, Origin)>);

impl Starting {
    /// Enters a start as `rank` of `size` at the store of this address, unless the settings keep it out.
    pub(crate) fn new(store: String, rank: usize, size: usize, config: &Config) -> Starting {
        if place::folder(&config.status).is_none() {
            return Starting(None);
        }
        let number = with(|registry| {
            registry.next_start += 1;
            registry.starts.push((registry.next_start, Waiting { store, rank, size, since: Instant::now() }));
            registry.serve(config);
            registry.next_start
        });
        Starting(Some((number, Origin::here())))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some((number, origin)) = self.0
            && origin.is_here()
        {
            with(|registry| registry.starts.retain(|(other, _)| *other != number));
        }
    }
}

/// Name of a communicator in events.
fn name(state: &State) -> String {
    let (rank, size) = (state.rank, state.members.len());
    format!("communicator {:016x}/{} (rank {rank} of {size})", state.control.job(), state.id)
}

/// Looks at the calls of communicators that no heartbeat looks at, so that their ages are known. True if there are any.
pub(super) fn look() -> bool {
    let mut any = false;
    for state in states() {
        any |= state.shown.look();
        if state.control.one_process() {
            any = true;
            let _ = state.progress.snapshot();
        }
    }
    any
}

/// Communicators of this process, those that are part of another one included.
fn states() -> Vec<Arc<State>> {
    with(|registry| registry.states.iter().filter_map(Weak::upgrade).collect())
}

/// Writes the records of this process's ranks, because somebody asked for them.
pub(super) fn write(folder: &Path, why: &str) -> io::Result<Vec<PathBuf>> {
    record::write(folder, &states(), why)
}

/// Writes the records that were asked for by a signal, and those of communicators that have failed.
pub(super) fn write_pending(asked: bool) {
    let states = states();
    states.iter().filter(|state| state.has_failed()).for_each(|state| state.record());
    if asked && let Some(folder) = states.iter().find_map(|state| state.config.dump.as_ref()) {
        told(write(Path::new(folder), "SIGUSR1"));
    }
}

/// Records of the rank whose communicator has failed.
fn failed(state: &State) {
    let (Some(folder), Some(error)) = (&state.config.dump, state.first_failure()) else { return };
    let ours = |other: &Arc<State>| {
        other.control.job() == state.control.job() && other.members[other.rank] == state.members[state.rank]
    };
    let states: Vec<Arc<State>> = states().into_iter().filter(ours).collect();
    told(record::write(Path::new(folder), &states, &format!("{} has failed: {error}", name(state))));
}

/// Tells where records were written, in the log.
fn told(written: io::Result<Vec<PathBuf>>) {
    match written {
        Ok(files) => {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            log::warn!("recorded in {}: tinynccl-cli status FOLDER shows it", files.join(", "));
        }
        Err(error) => log::warn!("the last calls are not recorded: {error}"),
    }
}

/// The report of this process. With `heard` also what the store knows of the other ranks, which takes up to two
/// seconds where it does not answer.
pub(super) fn report(heard: bool) -> Report {
    let (states, starts, events) = with(|registry| {
        let starts = registry.starts.iter().map(|(_, waiting)| Start {
            store: waiting.store.clone(),
            rank: waiting.rank,
            size: waiting.size,
            waits_ms: waiting.since.elapsed().as_millis() as u64,
        });
        let states: Vec<Arc<State>> = registry.states.iter().filter_map(Weak::upgrade).collect();
        (states, starts.collect(), registry.events.iter().cloned().collect())
    });
    let mut jobs: Vec<Job> = Vec::new();
    let mut comms = Vec::new();
    // Once is enough: each question to a store that does not answer takes as long as it may.
    let mut silence = None;
    for state in states.iter().filter(|state| !state.shown.is_hidden()) {
        let job = format!("{:016x}", state.control.job());
        if !jobs.iter().any(|known| known.job == job) {
            jobs.push(Job { job: job.clone(), ranks: member::places(state) });
        }
        let mut member = member::member(state, job);
        if heard {
            member.heard = Some(member::others(state, &mut silence));
        }
        comms.push(member);
    }
    Report {
        version: VERSION,
        host: Host::current().hostname,
        pid: std::process::id(),
        program: member::program(),
        starts,
        jobs,
        comms,
        events,
    }
}
