//! Content of this process's report: its communicators, its starts, its events.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::place;
use super::report::{Call, Device, Event, Heard, Job, Member, Place, Report, Standing, Start, VERSION, by_name};
use super::serve::{Server, Source};
use crate::executor::Supervisor as _;
use crate::state::State;
use tinynccl_plan::Error;
use tinynccl_sys::config::Config;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;
use tinynccl_transport::bootstrap::{Host, is_later};

/// Events that are kept.
const EVENTS: usize = 64;
/// Calls of a communicator that a report names.
const RECENT: usize = 8;

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
        let source = Source { look, report };
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
        let failure = self.0.failure().map_or_else(String::new, |error| format!(" after it failed: {error}"));
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
    let states = with(|registry| registry.states.iter().filter_map(Weak::upgrade).collect::<Vec<_>>());
    let mut any = false;
    for state in states {
        any |= state.shown.look();
        if state.control.one_process() {
            any = true;
            let _ = state.progress.snapshot();
        }
    }
    any
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
            jobs.push(Job { job: job.clone(), ranks: places(state) });
        }
        let mut member = member(state, job);
        if heard {
            member.heard = Some(others(state, &mut silence));
        }
        comms.push(member);
    }
    Report {
        version: VERSION,
        host: Host::current().hostname,
        pid: std::process::id(),
        program: program(),
        starts,
        jobs,
        comms,
        events,
    }
}

fn program() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The ranks of the world.
fn places(state: &State) -> Vec<Place> {
    let control = &*state.control;
    let host = |rank| if control.one_process() { Host::current().hostname } else { control.hostname(rank) };
    let place = |rank| Place { host: host(rank), pid: control.process(rank), address: control.address(rank) };
    (0..control.world_size()).map(place).collect()
}

fn member(state: &State, job: String) -> Member {
    let snapshot = state.progress.snapshot();
    let mut standing = Standing::of(&snapshot, state.id, &state.members);
    let mut calls = state.progress.calls();
    let device = state.shown.device().map(|(on, quiet_ms)| {
        calls.clear();
        let done = on.finished.unwrap_or(on.enqueued);
        // The first that is not over, where it is not known which have begun.
        let next = if is_later(on.enqueued, done) { done.wrapping_add(1) } else { done };
        standing = Standing {
            begun: on.begun.unwrap_or(next),
            done,
            call: on.call.as_ref().map(Call::of),
            quiet_ms,
            ..standing.clone()
        };
        Device {
            device: on.device,
            path: on.path,
            enqueued: on.enqueued,
            finished: on.finished,
            made: by_name(&on.made),
            started: on.started.as_deref().map(by_name),
            over: on.over.as_deref().map(by_name),
        }
    });
    let recent = calls.iter().skip(calls.len().saturating_sub(RECENT));
    Member {
        job,
        comm: state.id,
        name: state.shown.name().map(str::to_owned),
        rank: state.rank,
        members: state.members.clone(),
        standing,
        failure: state.failure().map(|error| error.to_string()),
        device,
        recent: recent.map(|call| Call::of(&call.header(state.id))).collect(),
        heard: None,
    }
}

/// State of the members as the store knows it, or as far as this process does where the store gives no answer, with the
/// reason in `silence`: then it is not asked again.
fn others(state: &State, silence: &mut Option<String>) -> Vec<Heard> {
    let health = match silence {
        Some(_) => Vec::new(),
        None => state.control.health(state.id).unwrap_or_else(|error| {
            *silence = Some(format!("the rendezvous store gives no answer: {error}"));
            Vec::new()
        }),
    };
    let limit = state.control.silence_limit();
    let heard = |&world: &usize| {
        let of = health.get(world);
        let gone = of.and_then(|of| of.gone.clone()).or_else(|| state.control.loss(world));
        let ended = || state.control.has_ended(world).then(|| "its process has ended".to_owned());
        let silent_for = of.map_or(Duration::ZERO, |of| of.silent_for);
        let progress = of.and_then(|of| of.progress.as_ref());
        Heard {
            silent_ms: silent_for.as_millis() as u64,
            silent: silent_for > limit,
            gone: gone.or_else(ended),
            left: state.control.has_left(world),
            standing: progress.map(|progress| Standing::of(progress, state.id, &state.members)),
            unknown: of.is_none().then(|| silence.clone()).flatten(),
        }
    };
    state.members.iter().map(heard).collect()
}
