//! Events of `MONITOR`: what differs between two looks.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use tinynccl::status::view::{State, View};

use super::commands::Groups;
use super::look::{Look, now};

/// One event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// True for one of a peer's or a communicator's life, false for other news.
    lifecycle: bool,
    name: &'static str,
    /// Host and process.
    peer: Option<(String, u32)>,
    details: String,
}

/// A process with its GPUs.
type Peers = BTreeMap<(String, u32), BTreeSet<usize>>;

fn peers(view: &View) -> Peers {
    let mut peers = Peers::new();
    for rank in view.comms.iter().flat_map(|comm| &comm.ranks) {
        let devices = peers.entry((rank.place.host.clone(), rank.place.pid)).or_default();
        devices.extend(rank.device.as_ref().map(|device| device.device));
    }
    peers
}

/// Processes with a rank in this state.
fn with(view: &View, states: &[State]) -> BTreeMap<(String, u32), String> {
    let ranks = view.comms.iter().flat_map(|comm| comm.ranks.iter().map(move |rank| (comm, rank)));
    ranks
        .filter(|(_, rank)| states.contains(&rank.state))
        .map(|(comm, rank)| {
            let why = rank.detail.clone().unwrap_or_default();
            ((rank.place.host.clone(), rank.place.pid), format!("rank {} of {}: {why}", rank.rank, comm.label()))
        })
        .collect()
}

/// Returns what has happened between two looks.
pub(super) fn events(before: &Look, after: &Look) -> Vec<Event> {
    let mut events = Vec::new();
    let mut add = |lifecycle, name, peer: Option<&(String, u32)>, details: String| {
        events.push(Event { lifecycle, name, peer: peer.cloned(), details });
    };
    let (old, new) = (peers(&before.view), peers(&after.view));
    for peer in new.keys().filter(|peer| !old.contains_key(*peer)) {
        add(true, "PEER_NEW", Some(peer), String::new());
    }
    let dead = |look: &Look| with(&look.view, &[State::Lost]);
    let known = dead(before);
    for (peer, details) in dead(after).into_iter().filter(|(peer, _)| !known.contains_key(peer)) {
        add(true, "PEER_DEAD", Some(&peer), details);
    }
    let known = known.keys().chain(dead(after).keys()).cloned().collect::<BTreeSet<_>>();
    for peer in old.keys().filter(|peer| !new.contains_key(*peer) && !known.contains(*peer)) {
        add(true, "PEER_LEFT", Some(peer), String::new());
    }
    let silent = |look: &Look| with(&look.view, &[State::Stopped, State::Silent]);
    let known = silent(before);
    for (peer, details) in silent(after).into_iter().filter(|(peer, _)| !known.contains_key(peer)) {
        add(false, "PEER_UNRESPONSIVE", Some(&peer), details);
    }
    let comms = |look: &Look| look.view.comms.iter().map(|comm| comm.label()).collect::<BTreeSet<_>>();
    let (old, new) = (comms(before), comms(after));
    new.difference(&old).for_each(|comm| add(true, "COMM_NEW", None, comm.clone()));
    old.difference(&new).for_each(|comm| add(true, "COMM_END", None, comm.clone()));
    // A wait gets longer: what counts is who waits for whom.
    let odd = |look: &Look| -> Vec<_> {
        look.findings.iter().map(|one| (one.comm, one.job.clone(), one.missing.clone())).collect()
    };
    let known = odd(before);
    for (key, finding) in odd(after).into_iter().zip(&after.findings) {
        if !known.contains(&key) {
            add(false, "FINDING", None, finding.text.clone());
        }
    }
    events
}

impl Event {
    /// The event in a client's format; `None` if the client has not asked for its group.
    pub(super) fn show(&self, groups: Groups, json: bool, look: &Look) -> Option<String> {
        if !(if self.lifecycle { groups.lifecycle } else { groups.trace }) {
            return None;
        }
        let time = now();
        let Event { name, details, .. } = self;
        if !json {
            let peer = self.peer.as_ref().map_or_else(String::new, |(host, pid)| format!("process {pid} on {host} "));
            return Some(format!("[{time}] {name}: {peer}{details}\n"));
        }
        let group = if self.lifecycle { "LIFECYCLE" } else { "TRACE" };
        let mut event = json!({ "timestamp": time, "group": group, "event": name, "details": details });
        if let (Some((host, pid)), Some(fields)) = (&self.peer, event.as_object_mut()) {
            let devices = peers(&look.view).remove(&(host.clone(), *pid)).unwrap_or_default();
            let peer = json!({ "host": host, "pid": pid, "cuda_devs": devices, "nvml_devs": devices });
            fields.insert("peer".to_owned(), peer);
        }
        Some(serde_json::to_string_pretty(&event).unwrap_or_default() + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl::status::report::Place;
    use tinynccl::status::view::{Comm, Rank, Source};

    fn look(ranks: &[(u32, State)]) -> Look {
        let rank = |(rank, &(pid, state)): (usize, &(u32, State))| Rank {
            rank,
            world: rank,
            place: Place { host: "h".to_owned(), pid, address: None },
            state,
            source: Source::Process,
            standing: None,
            detail: None,
            device: None,
            recent: Vec::new(),
            messages: Vec::new(),
            meets: None,
        };
        let ranks: Vec<Rank> = ranks.iter().enumerate().map(rank).collect();
        let comm = Comm { job: "ab".to_owned(), comm: 0, name: None, ranks };
        let comms = if comm.ranks.is_empty() { Vec::new() } else { vec![comm] };
        Look { view: View { comms, ..View::default() }, ..Look::default() }
    }

    fn names(before: &[(u32, State)], after: &[(u32, State)]) -> Vec<(&'static str, Option<u32>)> {
        events(&look(before), &look(after)).iter().map(|event| (event.name, event.peer.as_ref().map(|p| p.1))).collect()
    }

    #[test]
    fn processes_and_communicators_that_come_and_go_are_events_once() {
        let two = [(7, State::Idle), (8, State::Idle)];
        assert_eq!(names(&[], &two), [("PEER_NEW", Some(7)), ("PEER_NEW", Some(8)), ("COMM_NEW", None)]);
        assert_eq!(names(&two, &two), []);
        let lost = [(7, State::Failed), (8, State::Lost)];
        assert_eq!(names(&two, &lost), [("PEER_DEAD", Some(8))]);
        assert_eq!(names(&lost, &lost), []);
        assert_eq!(names(&lost, &[]), [("PEER_LEFT", Some(7)), ("COMM_END", None)]);
        assert_eq!(names(&two, &[(7, State::Idle), (8, State::Stopped)]), [("PEER_UNRESPONSIVE", Some(8))]);
    }

    #[test]
    fn a_client_gets_the_groups_that_it_asked_for() {
        let after = look(&[(7, State::Idle)]);
        let event = &events(&Look::default(), &after)[0];
        let (lifecycle, trace) = (Groups { lifecycle: true, trace: false }, Groups { lifecycle: false, trace: true });
        assert_eq!(event.show(trace, false, &after), None);
        let text = event.show(lifecycle, false, &after).unwrap();
        assert!(text.ends_with("PEER_NEW: process 7 on h \n"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&event.show(lifecycle, true, &after).unwrap()).unwrap();
        assert_eq!(
            (&json["event"], &json["group"], &json["peer"]["pid"]),
            (&json!("PEER_NEW"), &json!("LIFECYCLE"), &json!(7))
        );
    }
}
