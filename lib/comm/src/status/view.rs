//! The reports of all processes, as communicators with their ranks.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::ask::{Answers, Silent};
use super::report::{Call, Device, Heard, Meets, Member, Place, Report, Standing, Start, Underway};

/// Everything that is known of a host's jobs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct View {
    /// Communicators, by job and number.
    pub comms: Vec<Comm>,
    /// Starts that wait for ranks, by store.
    pub starts: Vec<Meeting>,
    /// Processes that gave a report.
    pub processes: Vec<Process>,
    /// Processes that gave none.
    pub silent: Vec<Silent>,
}

/// A process that gave a report.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    /// Name of its host.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Name of its program.
    pub program: String,
    /// Events, the last one at the end.
    pub events: Vec<super::report::Event>,
}

/// One communicator.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Comm {
    /// Number of its job, in hexadecimal digits.
    pub job: String,
    /// Number of the communicator in the job; 0 is the world.
    pub comm: u32,
    /// Name that the program gave it.
    pub name: Option<String>,
    /// Its ranks.
    pub ranks: Vec<Rank>,
}

/// One rank of a communicator.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// Its number in the world.
    pub world: usize,
    /// Process that runs it.
    pub place: Place,
    /// State of it.
    pub state: State,
    /// Source of the standing.
    pub source: Source,
    /// Its calls; `None` where nothing is known.
    pub standing: Option<Standing>,
    /// Error that it failed with, or how it ended.
    pub detail: Option<String>,
    /// Calls on its device.
    pub device: Option<Device>,
    /// The last collectives, the last one at the end.
    pub recent: Vec<Call>,
    /// Messages to and from single ranks that are under way.
    pub messages: Vec<Underway>,
    /// Wait for all ranks outside of calls.
    pub meets: Option<Meets>,
}

/// State of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// In a collective.
    InCall,
    /// Waits for a message, outside a collective.
    Message,
    /// Waits for all ranks, outside of calls.
    Meets,
    /// Between calls.
    Idle,
    /// Has closed the communicator.
    Closed,
    /// The communicator has failed.
    Failed,
    /// Left the job in order.
    Left,
    /// Its process has ended without a goodbye.
    Lost,
    /// Its process is stopped.
    Stopped,
    /// Its process does not answer, or its heartbeats do not come.
    Silent,
    /// Its process answers and does not have the communicator, or nothing is known of it.
    Unknown,
}

/// Source of a rank's standing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Its process.
    Process,
    /// Its last heartbeat.
    Heartbeat,
    /// There is none.
    Nothing,
}

/// Ranks that wait at one rendezvous.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meeting {
    /// Address of the store.
    pub store: String,
    /// Ranks that are expected.
    pub size: usize,
    /// Ranks of this host that wait, with their processes.
    pub here: Vec<(usize, u32)>,
    /// Milliseconds since the first of them came.
    pub waits_ms: u64,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::InCall => "in call",
            State::Message => "message",
            State::Meets => "meets",
            State::Idle => "idle",
            State::Closed => "closed",
            State::Failed => "failed",
            State::Left => "left",
            State::Lost => "lost",
            State::Stopped => "stopped",
            State::Silent => "silent",
            State::Unknown => "unknown",
        })
    }
}

impl Rank {
    /// Returns the rank whose message, or whose room for one, this rank waits for.
    pub fn awaits(&self) -> Option<usize> {
        let named = self.standing.as_ref().and_then(|standing| standing.waits_for);
        named.or(self.messages.first().map(|message| message.peer))
    }
}

impl Comm {
    /// The communicator in words: `communicator 0 of job 1234567890abcdef`.
    pub fn label(&self) -> String {
        let name = self.name.as_ref().map_or_else(String::new, |name| format!(" {name:?}"));
        format!("communicator {}{name} of job {}", self.comm, self.job)
    }
}

/// Puts answers together.
pub fn view(answers: &Answers) -> View {
    let mut comms: BTreeMap<(&str, u32), Vec<(&Report, &Member)>> = BTreeMap::new();
    for report in &answers.reports {
        for member in &report.comms {
            comms.entry((&member.job, member.comm)).or_default().push((report, member));
        }
    }
    // Records of one process have a report for each of its ranks.
    let first = |(at, report): &(usize, &Report)| {
        answers.reports[..*at].iter().all(|other| (&other.host, other.pid) != (&report.host, report.pid))
    };
    let processes = answers.reports.iter().enumerate().filter(first).map(|(_, report)| Process {
        host: report.host.clone(),
        pid: report.pid,
        program: report.program.clone(),
        events: report.events.clone(),
    });
    View {
        comms: comms.into_iter().filter_map(|((job, comm), members)| one(answers, job, comm, &members)).collect(),
        starts: meetings(&answers.reports),
        processes: processes.collect(),
        silent: answers.silent.clone(),
    }
}

fn one(answers: &Answers, job: &str, comm: u32, members: &[(&Report, &Member)]) -> Option<Comm> {
    let (first, any) = members.first()?;
    let places = &first.jobs.iter().find(|known| known.job == job)?.ranks;
    let heard = members.iter().find_map(|(_, member)| member.heard.as_ref());
    // Heartbeats tell the calls of the hosts, not those of the devices.
    let on_devices = members.iter().any(|(_, member)| member.device.is_some());
    let ranks = any.members.iter().enumerate().map(|(rank, &world)| {
        let place = places.get(world).cloned().unwrap_or(Place { host: "?".to_owned(), pid: 0, address: None });
        match members.iter().find(|(_, member)| member.rank == rank) {
            Some((_, member)) => reported(member, place),
            None => {
                let here = first.host == place.host;
                let silent = answers.silent.iter().find(|silent| here && silent.pid == place.pid);
                let answered = answers.reports.iter().any(|r| (r.pid, &r.host) == (place.pid, &place.host));
                let heard = heard.and_then(|all| all.get(rank));
                let heard =
                    heard.cloned().map(|heard| Heard { standing: heard.standing.filter(|_| !on_devices), ..heard });
                unreported((rank, world), place, silent, answered, heard.as_ref())
            }
        }
    });
    let name = members.iter().find_map(|(_, member)| member.name.clone());
    Some(Comm { job: job.to_owned(), comm, name, ranks: ranks.collect() })
}

/// State of a rank by its calls.
fn state(standing: &Standing) -> State {
    match standing {
        one if one.is_in_call() => State::InCall,
        one if one.waits_for.is_some() => State::Message,
        one if one.closed => State::Closed,
        _ => State::Idle,
    }
}

fn reported(member: &Member, place: Place) -> Rank {
    Rank {
        rank: member.rank,
        world: member.members.get(member.rank).copied().unwrap_or(member.rank),
        place,
        state: match state(&member.standing) {
            _ if member.failure.is_some() => State::Failed,
            State::Idle | State::Message if member.meets.is_some() => State::Meets,
            // It may still wait for the link.
            State::Idle if !member.messages.is_empty() => State::Message,
            other => other,
        },
        source: Source::Process,
        standing: Some(member.standing.clone()),
        detail: member.failure.clone(),
        device: member.device.clone(),
        recent: member.recent.clone(),
        messages: member.messages.clone(),
        meets: member.meets.clone(),
    }
}

/// A rank whose process gave no report, or does not have the communicator.
fn unreported(
    (rank, world): (usize, usize),
    place: Place,
    silent: Option<&Silent>,
    answered: bool,
    heard: Option<&Heard>,
) -> Rank {
    let standing = heard.and_then(|heard| heard.standing.clone());
    let (state, detail) = match (silent, heard) {
        (Some(silent), _) if silent.stopped => (State::Stopped, Some("the system says that it is stopped".to_owned())),
        (_, Some(Heard { left: true, .. })) => (State::Left, None),
        (_, Some(Heard { gone: Some(why), .. })) => (State::Lost, Some(why.clone())),
        (Some(silent), _) => (State::Silent, Some(silent.why.clone())),
        (_, Some(Heard { silent: true, silent_ms, .. })) => {
            (State::Silent, Some(format!("no heartbeat for {}", seconds(*silent_ms))))
        }
        _ => match &standing {
            Some(standing) => (state(standing), None),
            None if answered => (State::Unknown, Some("its process does not have this communicator".to_owned())),
            None => {
                let why = heard
                    .and_then(|heard| heard.unknown.as_ref())
                    .map_or_else(String::new, |why| format!(", and {why}"));
                (State::Unknown, Some(format!("its process gave no report{why}")))
            }
        },
    };
    let source = if standing.is_some() { Source::Heartbeat } else { Source::Nothing };
    Rank {
        rank,
        world,
        place,
        state,
        source,
        standing,
        detail,
        device: None,
        recent: Vec::new(),
        messages: Vec::new(),
        meets: None,
    }
}

/// The starts that wait, by store.
fn meetings(reports: &[Report]) -> Vec<Meeting> {
    let mut found: Vec<Meeting> = Vec::new();
    for (report, start) in reports.iter().flat_map(|report| report.starts.iter().map(move |start| (report, start))) {
        let Start { store, rank, size, waits_ms } = start.clone();
        let at = found.iter().position(|meeting| (&meeting.store, meeting.size) == (&store, size));
        let at = at.unwrap_or_else(|| {
            found.push(Meeting { store, size, here: Vec::new(), waits_ms: 0 });
            found.len() - 1
        });
        let meeting = &mut found[at];
        meeting.here.push((rank, report.pid));
        meeting.here.sort_unstable();
        meeting.waits_ms = meeting.waits_ms.max(waits_ms);
    }
    found
}

/// Milliseconds as people read them: `0.4 s`, `12 s`, `3 min 5 s`.
pub fn seconds(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        10_000..120_000 => format!("{} s", ms / 1000),
        _ => format!("{} min {} s", ms / 60_000, ms / 1000 % 60),
    }
}
