//! Which rank the others wait for: what a person would conclude from the table.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::view::{Comm, Meeting, Rank, State, View, seconds};
use tinynccl_transport::bootstrap::is_later;

/// Something odd about a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Number of the job; `None` at a rendezvous.
    pub job: Option<String>,
    /// Number of the communicator.
    pub comm: Option<u32>,
    /// Ranks that the others wait for.
    pub missing: Vec<usize>,
    /// Sentence for people.
    pub text: String,
}

/// Looks for ranks that others wait for, where that has lasted for `after`; for failures, and for ranks that are gone.
pub fn findings(view: &View, after: Duration) -> Vec<Finding> {
    let after = after.as_millis() as u64;
    let comms = view.comms.iter().filter_map(|comm| {
        let found = failed(comm)
            .or_else(|| stuck(view, comm, after))
            .or_else(|| meets(view, comm, after))
            .or_else(|| messages(view, comm, after))
            .or_else(|| unwell(comm));
        found.map(|(missing, text)| Finding {
            job: Some(comm.job.clone()),
            comm: Some(comm.comm),
            missing,
            text: format!("{}: {text}", comm.label()),
        })
    });
    let starts = view.starts.iter().filter(|meeting| meeting.waits_ms >= after).map(start);
    comms.chain(starts).collect()
}

type Found = Option<(Vec<usize>, String)>;

/// A communicator that has failed.
fn failed(comm: &Comm) -> Found {
    let failed: Vec<&Rank> = comm.ranks.iter().filter(|rank| rank.state == State::Failed).collect();
    let why = failed.first()?.detail.clone().unwrap_or_default();
    // Ranks that have failed are there; it was one of the others that they missed.
    let away = |rank: &&Rank| is_unwell(rank) || matches!(rank.state, State::Left | State::Closed);
    let gone: Vec<&Rank> = comm.ranks.iter().filter(away).collect();
    let each: String = gone.iter().map(|rank| format!("; {}", condition(rank))).collect();
    let failed = names(failed.iter().map(|rank| rank.rank));
    Some((gone.iter().map(|rank| rank.rank).collect(), format!("it has failed on {failed}: {why}{each}")))
}

/// Ranks that wait in a collective.
fn stuck(view: &View, comm: &Comm, after: u64) -> Found {
    let begun = |rank: &Rank| rank.standing.as_ref().map_or(0, |standing| standing.begun);
    let waits = |rank: &&Rank| rank.state == State::InCall;
    let long = |rank: &&Rank| rank.standing.as_ref().is_some_and(|standing| standing.quiet_ms >= after);
    // One that waits for so long counts for all that are in its call.
    let last =
        comm.ranks.iter().filter(waits).filter(long).reduce(|a, b| if is_later(begun(b), begun(a)) { b } else { a })?;
    let (number, standing) = (begun(last), last.standing.as_ref()?);
    let here: Vec<&Rank> = comm.ranks.iter().filter(|rank| waits(rank) && begun(rank) == number).collect();
    let longest = here.iter().filter_map(|rank| Some(rank.standing.as_ref()?.quiet_ms)).max().unwrap_or(0);
    let call = standing.call.as_ref().map_or_else(|| format!("call #{number}"), ToString::to_string);
    let waiting = format!("{} in {call} for {}", verb(&here, "waits", "wait"), seconds(longest));
    let missing: Vec<&Rank> = comm.ranks.iter().filter(|rank| is_later(number, begun(rank))).collect();
    if !missing.is_empty() {
        let each: Vec<String> = missing.iter().map(|rank| absence(view, comm, rank)).collect();
        let text = format!("{waiting}, and {} not made it: {}", verb(&missing, "has", "have"), each.join("; "));
        return Some((missing.iter().map(|rank| rank.rank).collect(), text));
    }
    let unwell: Vec<&Rank> = comm.ranks.iter().filter(|rank| is_unwell(rank)).collect();
    if !unwell.is_empty() {
        let each: Vec<String> = unwell.iter().map(|rank| condition(rank)).collect();
        return Some((unwell.iter().map(|rank| rank.rank).collect(), format!("{waiting}; {}", each.join("; "))));
    }
    if let Some(text) = different(comm, number) {
        return Some((Vec::new(), text));
    }
    let whom: Vec<String> = here
        .iter()
        .filter_map(|rank| Some(format!("rank {} for rank {}", rank.rank, rank.standing.as_ref()?.waits_for?)))
        .collect();
    let whom = if whom.is_empty() { String::new() } else { format!(" ({})", whom.join(", ")) };
    Some((
        Vec::new(),
        format!("{waiting}{whom}, and so has every rank made it: its data does not arrive, or takes long"),
    ))
}

/// Ranks that wait for a message.
fn messages(view: &View, comm: &Comm, after: u64) -> Found {
    let awaited = |rank: &Rank| rank.awaits().filter(|_| rank.state == State::Message);
    let long = |rank: &&Rank| rank.standing.as_ref().is_some_and(|standing| standing.quiet_ms >= after);
    let waiting: Vec<&Rank> = comm.ranks.iter().filter(|rank| awaited(rank).is_some()).filter(long).collect();
    let each: Vec<String> = waiting
        .iter()
        .filter_map(|rank| {
            let (peer, standing) = (awaited(rank)?, rank.standing.as_ref()?);
            let call = rank.messages.iter().find(|message| message.peer == peer).map(|message| &message.call);
            let call = call.map_or_else(String::new, |call| format!(" in {call}"));
            Some(format!("rank {} waits for rank {peer}{call} for {}", rank.rank, seconds(standing.quiet_ms)))
        })
        .collect();
    // Whom they wait for in the end: ranks that do not themselves wait for a message.
    let mut missing: Vec<&Rank> = waiting
        .iter()
        .filter_map(|rank| comm.ranks.get(awaited(rank)?))
        .filter(|peer| awaited(peer).is_none())
        .collect();
    missing.sort_by_key(|rank| rank.rank);
    missing.dedup_by_key(|rank| rank.rank);
    let why: Vec<String> = missing.iter().map(|rank| absence(view, comm, rank)).collect();
    let why = match (waiting.is_empty(), why.is_empty()) {
        (true, _) => return None,
        (false, false) => why.join("; "),
        // In a circle.
        (false, true) => "none of them goes on: put such messages into one group".to_owned(),
    };
    Some((missing.iter().map(|rank| rank.rank).collect(), format!("{}; {why}", each.join(", "))))
}

/// Ranks that wait for all others outside of calls.
fn meets(view: &View, comm: &Comm, after: u64) -> Found {
    let waits = |rank: &&Rank| rank.state == State::Meets;
    let long = |rank: &&Rank| rank.meets.as_ref().is_some_and(|meets| meets.waits_ms >= after);
    let what = &comm.ranks.iter().filter(waits).find(long)?.meets.as_ref()?.what;
    let same = |rank: &&Rank| waits(rank) && rank.meets.as_ref().is_some_and(|meets| meets.what == *what);
    let (here, missing): (Vec<&Rank>, Vec<&Rank>) = comm.ranks.iter().partition(same);
    let longest = here.iter().filter_map(|rank| Some(rank.meets.as_ref()?.waits_ms)).max()?;
    let waiting = format!("{} in {what} for {}", verb(&here, "waits", "wait"), seconds(longest));
    if missing.is_empty() {
        return Some((Vec::new(), format!("{waiting}, and so has every rank come: the rendezvous store takes long")));
    }
    let each: Vec<String> = missing.iter().map(|rank| absence(view, comm, rank)).collect();
    let text = format!("{waiting}, and {} not come: {}", verb(&missing, "has", "have"), each.join("; "));
    Some((missing.iter().map(|rank| rank.rank).collect(), text))
}

/// Why a rank has not made the call of the others.
fn absence(view: &View, comm: &Comm, rank: &Rank) -> String {
    if is_unwell(rank) || matches!(rank.state, State::Left | State::Unknown) {
        return condition(rank);
    }
    let last = last(rank).unwrap_or_else(|| "it has made no call here".to_owned());
    let more = match rank.state {
        State::Closed => ", and it has closed the communicator".to_owned(),
        State::InCall => rank.awaits().map_or_else(String::new, |peer| format!(", where it waits for rank {peer}")),
        State::Message => {
            rank.awaits().map_or_else(String::new, |peer| format!(", and it exchanges messages with rank {peer}"))
        }
        State::Meets => rank.meets.as_ref().map_or_else(String::new, |meets| {
            format!(", and it waits in {} for {}", meets.what, seconds(meets.waits_ms))
        }),
        _ => elsewhere(view, comm, rank).unwrap_or_default(),
    };
    format!("rank {} (process {} on {}): {last}{more}", rank.rank, rank.place.pid, rank.place.host)
}

/// The last call of a rank, if it has made one.
fn last(rank: &Rank) -> Option<String> {
    let standing = rank.standing.as_ref()?;
    let (call, ms) = (standing.call.as_ref()?, seconds(standing.quiet_ms));
    Some(match standing.is_in_call() {
        true => format!("it is still in {} #{} for {ms}", call.name, call.number),
        false => format!("its last call was {} #{}, which ended {ms} ago", call.name, call.number),
    })
}

/// The call of another communicator that the same rank is in.
fn elsewhere(view: &View, comm: &Comm, rank: &Rank) -> Option<String> {
    let others = view.comms.iter().filter(|other| (&other.job, other.comm) != (&comm.job, comm.comm));
    others.into_iter().find_map(|other| {
        // Ranks of one process are told apart by their number in the world.
        let same = |one: &&Rank| one.place == rank.place && (other.job != comm.job || one.world == rank.world);
        let there = other.ranks.iter().filter(same).find(|one| one.state == State::InCall)?;
        let call = there.standing.as_ref()?.call.as_ref()?;
        Some(format!(", and it is in {} #{} of {}", call.name, call.number, other.label()))
    })
}

/// Ranks that made different calls at one number.
fn different(comm: &Comm, number: u32) -> Option<String> {
    let mut calls: Vec<(String, Vec<usize>)> = Vec::new();
    for rank in &comm.ranks {
        let call = rank.standing.as_ref()?.call.as_ref()?;
        let text = call.to_string();
        if call.number != number {
            continue;
        }
        match calls.iter_mut().find(|(other, _)| *other == text) {
            Some((_, ranks)) => ranks.push(rank.rank),
            None => calls.push((text, vec![rank.rank])),
        }
    }
    let all: Vec<String> =
        calls.iter().map(|(text, ranks)| format!("{} made {text}", names(ranks.iter().copied()))).collect();
    (calls.len() > 1).then(|| format!("ranks made different calls: {}", all.join(", ")))
}

/// True for a rank whose process does not run as it should.
fn is_unwell(rank: &Rank) -> bool {
    matches!(rank.state, State::Stopped | State::Silent | State::Lost)
}

/// State of a rank whose calls do not tell it.
fn condition(rank: &Rank) -> String {
    let why = rank.detail.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    // As of its last heartbeat, where it does not answer.
    let last = last(rank).map_or_else(String::new, |last| format!(": {last}"));
    let state = match rank.state {
        State::Left => "has left the job".to_owned(),
        State::Closed => "has closed the communicator".to_owned(),
        other => format!("is {other}"),
    };
    format!("rank {} (process {} on {}) {state}{why}{last}", rank.rank, rank.place.pid, rank.place.host)
}

/// Ranks that are gone or stopped, although no rank waits yet.
fn unwell(comm: &Comm) -> Found {
    let unwell: Vec<&Rank> = comm.ranks.iter().filter(|rank| is_unwell(rank)).collect();
    let each: Vec<String> = unwell.iter().map(|rank| condition(rank)).collect();
    (!unwell.is_empty()).then(|| (unwell.iter().map(|rank| rank.rank).collect(), each.join("; ")))
}

/// Ranks that wait at a rendezvous.
fn start(meeting: &Meeting) -> Finding {
    let Meeting { store, size, here, waits_ms } = meeting;
    let missing: Vec<usize> = (0..*size).filter(|rank| here.iter().all(|(other, _)| other != rank)).collect();
    let waiting = names(here.iter().map(|(rank, _)| *rank));
    let verb = if here.len() == 1 { "waits" } else { "wait" };
    let whom = if missing.is_empty() {
        "all have come".to_owned()
    } else {
        format!("on this host no process has come as {}", names(missing.iter().copied()))
    };
    let text = format!("start of {size} ranks at {store}: {waiting} {verb} for {}, and {whom}", seconds(*waits_ms));
    Finding { job: None, comm: None, missing, text }
}

/// Ranks as the subject of a verb.
fn verb(ranks: &[&Rank], one: &str, several: &str) -> String {
    format!("{} {}", names(ranks.iter().map(|rank| rank.rank)), if ranks.len() == 1 { one } else { several })
}

/// `rank 2`, `ranks 0, 1 and 5`; long lists as ranges.
fn names(ranks: impl Iterator<Item = usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let count: usize = ranges.iter().map(|(first, last)| last - first + 1).sum();
    let text: Vec<String> = ranges
        .iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first} to {last}"),
        })
        .collect();
    format!("{} {}", if count == 1 { "rank" } else { "ranks" }, text.join(", "))
}

#[cfg(test)]
#[path = "findings_tests.rs"]
mod tests;
