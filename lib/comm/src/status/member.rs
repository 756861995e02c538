//! Report of this process on one of its communicators.

use std::path::Path;
use std::time::Duration;

use super::report::{Call, Device, Heard, Meets, Member, Place, Standing, Underway, by_name};
use crate::state::State;
use tinynccl_transport::bootstrap::{Host, Message, Recorded, is_later};

/// Calls of a communicator that a report names.
const RECENT: usize = 8;

/// Name of the program.
pub(super) fn program() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    Path::new(&path).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The ranks of the world.
pub(super) fn places(state: &State) -> Vec<Place> {
    let control = &*state.control;
    let host = |rank| if control.one_process() { Host::current().hostname } else { control.hostname(rank) };
    let place = |rank| Place { host: host(rank), pid: control.process(rank), address: control.address(rank) };
    (0..control.world_size()).map(place).collect()
}

pub(super) fn member(state: &State, job: String) -> Member {
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
        failure: state.first_failure().map(|error| error.to_string()),
        device,
        messages: messages(state),
        meets: state.shown.met().map(|(what, waits_ms)| Meets { what, waits_ms }),
        recent: recent.map(|call| Call::of(&call.header(state.id))).collect(),
        heard: None,
    }
}

/// The last messages that are under way.
fn messages(state: &State) -> Vec<Underway> {
    let all = state.progress.messages(RECENT).into_iter().filter(|(_, over)| !over);
    let call = |one: Recorded| {
        let Message { peer, sends, dtype, count, .. } = Message::from(&one);
        let end = |is: bool| is.then_some(peer as usize);
        let call = Call::message(one.number(), (dtype, count), end(sends), end(!sends));
        Underway { peer: peer as usize, call }
    };
    all.map(|(one, _)| call(one)).collect()
}

/// State of the members as the store knows it, or as far as this process does where the store gives no answer, with the
/// reason in `silence`: then it is not asked again.
pub(super) fn others(state: &State, silence: &mut Option<String>) -> Vec<Heard> {
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
