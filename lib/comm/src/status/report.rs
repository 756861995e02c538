//! One process's report: its communicators, each rank's standing in them, and what has happened last.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use tinynccl_plan::dtype::DType;
use tinynccl_plan::wire::{Collective, Header};
use tinynccl_transport::bootstrap::{Made, Snapshot, is_later};

/// Version of the format. A reader refuses another one.
pub const VERSION: u32 = 2;

/// One process, as it sees itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`] of the library that made it.
    pub version: u32,
    /// Name of its host.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Name of its program.
    pub program: String,
    /// Starts of communicators that wait for ranks.
    pub starts: Vec<Start>,
    /// Jobs that the communicators belong to.
    pub jobs: Vec<Job>,
    /// Communicators that live.
    pub comms: Vec<Member>,
    /// Events, the last one at the end.
    pub events: Vec<Event>,
}

/// A rank that waits at a rendezvous.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Address of the store.
    pub store: String,
    /// The rank that the process takes.
    pub rank: usize,
    /// Ranks that are expected.
    pub size: usize,
    /// Milliseconds since it came.
    pub waits_ms: u64,
}

/// Ranks that met at one rendezvous: a world, and the communicators split from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its number, in hexadecimal digits.
    pub job: String,
    /// Processes of the ranks, by rank of the world.
    pub ranks: Vec<Place>,
}

/// Process that runs a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Name of its host.
    pub host: String,
    /// Process id there.
    pub pid: u32,
    /// Address by which other hosts reach it, where ranks are on several.
    pub address: Option<IpAddr>,
}

/// One rank of a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Number of its job.
    pub job: String,
    /// Number of the communicator in the job; 0 is the world.
    pub comm: u32,
    /// Name that the program gave it.
    pub name: Option<String>,
    /// The rank of this process.
    pub rank: usize,
    /// Ranks of the world, by rank.
    pub members: Vec<usize>,
    /// Calls of this rank.
    pub standing: Standing,
    /// The error that it failed with.
    pub failure: Option<String>,
    /// Calls on a device; the standing is theirs then.
    pub device: Option<Device>,
    /// The last collectives, the last one at the end; not those on a device.
    pub recent: Vec<Call>,
    /// Messages to and from single ranks that are under way.
    pub messages: Vec<Underway>,
    /// Wait for all ranks outside of calls.
    pub meets: Option<Meets>,
    /// State of all ranks as the rendezvous store knows it, by rank; only where it was asked for.
    pub heard: Option<Vec<Heard>>,
}

/// A wait for all ranks of a communicator outside of its calls: in split, agree, shrink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meets {
    /// Its name, the same on all ranks.
    pub what: String,
    /// Milliseconds since the rank came.
    pub waits_ms: u64,
}

/// Calls of a rank on a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Standing {
    /// Number of the call that was begun last; 0 before the first.
    pub begun: u32,
    /// Number of the call that ended last.
    pub done: u32,
    /// The call that was begun last.
    pub call: Option<Call>,
    /// Rank that is awaited now.
    pub waits_for: Option<usize>,
    /// True once the rank has closed the communicator.
    pub closed: bool,
    /// Milliseconds since the numbers were last seen to change, to a heartbeat.
    pub quiet_ms: u64,
}

/// One collective.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// Its number on the communicator.
    pub number: u32,
    /// Type, operator, count and root, as text.
    pub arguments: String,
    /// Bytes of the count.
    pub bytes: u64,
}

/// A message that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Underway {
    /// Rank at its other end.
    pub peer: usize,
    /// The message; its number counts the messages of the rank.
    #[serde(flatten)]
    pub call: Call,
}

/// Calls that a rank has enqueued on its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Number of the device, as CUDA counts.
    pub device: usize,
    /// Path of the data.
    pub path: String,
    /// Calls that were enqueued.
    pub enqueued: u32,
    /// Calls that are over on the device; `None` where that is not known.
    pub finished: Option<u32>,
    /// Calls that were enqueued, by the name of the collective.
    pub made: BTreeMap<String, u64>,
    /// Calls of `made` that the device has begun; `None` where that is not known.
    pub started: Option<BTreeMap<String, u64>>,
    /// Calls of `made` that are over on the device; `None` where that is not known.
    pub over: Option<BTreeMap<String, u64>>,
}

/// A rank, as the rendezvous store knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// Milliseconds since its last sign of life.
    pub silent_ms: u64,
    /// True if that is longer than a rank that runs is silent.
    pub silent: bool,
    /// Its end, as text; `None` if it has not ended.
    pub gone: Option<String>,
    /// True if it left in order.
    pub left: bool,
    /// Its calls as of its last heartbeat; `None` if it has none on this communicator.
    pub standing: Option<Standing>,
    /// Reason for which the store told nothing.
    pub unknown: Option<String>,
}

/// An event of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// The event, as text.
    pub text: String,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} ({})", self.name, self.number, self.arguments)
    }
}

impl Call {
    /// Returns the call of a header.
    pub(crate) fn of(header: &Header) -> Call {
        // `all_reduce #3 of comm 1 (f32, sum, count 10)`
        let text = header.to_string();
        let name = text.split(' ').next().unwrap_or_default().to_owned();
        let arguments = text.split_once('(').map_or("", |(_, rest)| rest.trim_end_matches(')'));
        let arguments = arguments.split("; message").next().unwrap_or_default().to_owned();
        let size = DType::from_code(header.dtype).map_or(0, DType::size) as u64;
        Call { name, number: header.seq, arguments, bytes: header.elements() * size }
    }
}

impl Call {
    /// Returns a message, or a round of two, under its name and with its ends.
    pub(crate) fn message(number: u32, (dtype, count): (u8, u64), to: Option<usize>, from: Option<usize>) -> Call {
        let name = match (to, from) {
            (Some(_), None) => "send",
            (None, Some(_)) => "recv",
            _ => "send/recv",
        };
        let dtype = DType::from_code(dtype);
        let mut arguments = format!("{}, count {count}", dtype.map_or("?", DType::name));
        let ends = [("to", to), ("from", from)].into_iter().filter_map(|(word, rank)| Some((word, rank?)));
        ends.for_each(|(word, rank)| arguments += &format!(", {word} rank {rank}"));
        Call { name: name.to_owned(), number, arguments, bytes: count * dtype.map_or(0, DType::size) as u64 }
    }
}

impl Standing {
    /// Returns the standing of a rank of `members`, which are ranks of the world.
    pub(crate) fn of(snapshot: &Snapshot, comm: u32, members: &[usize]) -> Standing {
        let of_world = |world: usize| members.iter().position(|&member| member == world);
        Standing {
            begun: snapshot.seq_started as u32,
            done: snapshot.seq_done as u32,
            call: snapshot.call.as_ref().map(|call: &Made| Call::of(&call.header(comm))),
            waits_for: snapshot.waiting_on.and_then(of_world),
            closed: snapshot.closed,
            quiet_ms: snapshot.quiet.0,
        }
    }

    /// Returns true while a collective is under way.
    pub fn is_in_call(&self) -> bool {
        is_later(self.begun, self.done)
    }
}

/// Names of collectives with their counts, of an array by code.
pub(crate) fn by_name(counts: &[u64]) -> BTreeMap<String, u64> {
    let name = |code: usize| Collective::from_code(code as u8).map(|collective| collective.name().to_owned());
    counts.iter().enumerate().filter_map(|(code, &count)| Some((name(code)?, count))).collect()
}
