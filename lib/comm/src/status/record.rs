//! The record of a rank: its report, and the last calls of each of its communicators. One file per rank.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::member;
use super::report::{Call, Report, VERSION};
use crate::state::State;
use crate::state::shown::{DeviceCalls, Enqueued};
use tinynccl_plan::dtype::DType;
use tinynccl_plan::wire::{Collective, Header};
use tinynccl_sys::ticks::Scale;
use tinynccl_transport::bootstrap::{Host, Made, Message, RECORDED, Recorded, is_later};

/// A rank's record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Reason for writing it: a failure, a signal, a question.
    pub why: String,
    /// The rank of the world.
    pub rank: usize,
    /// Nanoseconds since 1970 when it was written.
    pub at_ns: u64,
    /// Report of the rank's process, with its communicators of this job.
    pub report: Report,
    /// Calls of each communicator of the report, in the same order.
    pub calls: Vec<Vec<CallRecord>>,
}

/// One call, or a round of messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    /// The call. Messages are numbered in the order in which the rank made them.
    #[serde(flatten)]
    pub call: Call,
    /// Type of the elements.
    pub dtype: String,
    /// Elements per rank.
    pub count: u64,
    /// Number among the collectives, equal on all ranks; `None` for messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collective: Option<u32>,
    /// The root, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<usize>,
    /// Receiver of our message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<usize>,
    /// Sender of the message to us.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<usize>,
    /// Number of the message among those of its sender to its receiver, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<u32>,
    /// Progress of it.
    pub state: Stage,
    /// Nanoseconds since 1970 when the rank made it. Of short calls that did not wait one in sixteen has its time; the
    /// others have that of the one before.
    pub begun_ns: u64,
    /// Nanoseconds since 1970 when it was over, where that was noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_ns: Option<u64>,
}

/// Progress of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// On its stream; the device has not come to it, as far as is known.
    Enqueued,
    /// Under way.
    Begun,
    /// Over.
    Over,
}

/// Returns the records of the ranks that these communicators belong to.
pub(super) fn records(states: &[Arc<State>], why: &str) -> Vec<Record> {
    let scale = Scale::now();
    let mut records: Vec<Record> = Vec::new();
    for state in states.iter().filter(|state| !state.shown.is_hidden()) {
        let (job, rank) = (format!("{:016x}", state.control.job()), state.members[state.rank]);
        let at = records.iter().position(|record| record.rank == rank && record.report.jobs[0].job == job);
        let record = match at {
            Some(at) => &mut records[at],
            None => {
                let ranks = member::places(state);
                let report = Report {
                    version: VERSION,
                    host: Host::current().hostname,
                    pid: std::process::id(),
                    program: member::program(),
                    jobs: vec![super::report::Job { job: job.clone(), ranks }],
                    ..Report::default()
                };
                records.push(Record { why: why.to_owned(), rank, at_ns: scale.now_ns(), report, calls: Vec::new() });
                records.last_mut().expect("one was pushed")
            }
        };
        record.report.comms.push(member::member(state, job));
        record.calls.push(calls(state, &scale));
    }
    records
}

/// The last calls of a communicator, in the order in which they were made.
fn calls(state: &State, scale: &Scale) -> Vec<CallRecord> {
    if let Some((enqueued, device)) = state.shown.recorded() {
        return enqueued.iter().map(|one| on_device(one, &device, scale)).collect();
    }
    let done = state.progress.snapshot().seq_done as u32;
    let mut collectives = state.progress.recorded();
    fill(collectives.iter_mut().map(|one| &mut one.begun));
    let mut messages = state.progress.messages(RECORDED);
    fill(messages.iter_mut().map(|(one, _)| &mut one.begun));
    let collectives = collectives.iter().map(|one| (one.begun, collective(one, state.id, done, scale)));
    let messages = messages.iter().map(|(one, over)| (one.begun, message(one, *over, scale)));
    let mut all: Vec<(u64, CallRecord)> = collectives.chain(messages).collect();
    all.sort_by_key(|(begun, _)| *begun);
    all.into_iter().map(|(_, call)| call).collect()
}

/// Gives a call whose time was not noted that of the one before, or of the first one that has any.
fn fill<'a>(ticks: impl Iterator<Item = &'a mut u64>) {
    let all: Vec<&mut u64> = ticks.collect();
    let mut last = all.iter().map(|one| **one).find(|&one| one != 0).unwrap_or(0);
    for one in all {
        if *one == 0 {
            *one = last;
        }
        last = *one;
    }
}

/// The time of these ticks; 0 if no call has any.
fn time(scale: &Scale, ticks: u64) -> u64 {
    known(scale, ticks).unwrap_or(0)
}

fn known(scale: &Scale, ticks: u64) -> Option<u64> {
    (ticks != 0).then(|| scale.ns(ticks))
}

fn dtype(code: u8) -> String {
    DType::from_code(code).map_or_else(|| format!("type {code}"), |dtype| dtype.to_string())
}

fn collective(one: &Recorded, comm: u32, done: u32, scale: &Scale) -> CallRecord {
    let header = Made::from(*one).header(comm);
    let over = !is_later(header.seq, done);
    CallRecord {
        collective: Some(header.seq),
        state: if over { Stage::Over } else { Stage::Begun },
        begun_ns: time(scale, one.begun),
        over_ns: known(scale, one.over).filter(|_| over),
        ..of(&header)
    }
}

fn message(one: &Recorded, over: bool, scale: &Scale) -> CallRecord {
    let Message { peer, sends, seq, dtype, count } = Message::from(one);
    let peer = |is: bool| is.then_some(peer as usize);
    let header = Header { seq: one.number(), count, dtype, root: Header::NO_ROOT, ..Header::default() };
    CallRecord {
        call: Call::message(one.number(), (dtype, count), peer(sends), peer(!sends)),
        to: peer(sends),
        from: peer(!sends),
        message: Some(seq),
        state: if over { Stage::Over } else { Stage::Begun },
        begun_ns: time(scale, one.begun),
        over_ns: known(scale, one.over).filter(|_| over),
        ..of(&header)
    }
}

fn on_device(one: &Enqueued, device: &DeviceCalls, scale: &Scale) -> CallRecord {
    let Header { seq, count, dtype, collective, .. } = one.call;
    let reached = |number: Option<u32>| number.is_some_and(|number| !is_later(seq, number));
    let state = match (reached(device.finished), reached(device.begun)) {
        (true, _) => Stage::Over,
        (false, true) => Stage::Begun,
        (false, false) => Stage::Enqueued,
    };
    let message = collective == Collective::SendRecv as u8;
    let call = if message { Call::message(seq, (dtype, count), one.to, one.from) } else { Call::of(&one.call) };
    CallRecord {
        call,
        collective: (!message).then_some(one.collective),
        to: one.to,
        from: one.from,
        state,
        begun_ns: scale.ns(one.ticks),
        ..of(&one.call)
    }
}

/// A record of the call alone.
fn of(header: &Header) -> CallRecord {
    let rooted = Collective::from_code(header.collective).is_some_and(Collective::has_root);
    CallRecord {
        call: Call::of(header),
        dtype: dtype(header.dtype),
        count: header.elements(),
        collective: None,
        root: (rooted && header.root != Header::NO_ROOT).then_some(header.root as usize),
        to: None,
        from: None,
        message: None,
        state: Stage::Over,
        begun_ns: 0,
        over_ns: None,
    }
}

/// Writes the records of the ranks that these communicators belong to: `FOLDER/JOB/rank_RANK.json`. Returns the files.
///
/// # Errors
/// A file could not be written; the error names it.
pub(super) fn write(folder: &Path, states: &[Arc<State>], why: &str) -> io::Result<Vec<PathBuf>> {
    /// Two threads of this process may write one file.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let mut files = Vec::new();
    for record in records(states, why) {
        let of_job = folder.join(&record.report.jobs[0].job);
        let file = of_job.join(format!("rank_{}.json", record.rank));
        let unique = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let unfinished = of_job.join(format!(".rank_{}-{}-{unique}", record.rank, record.report.pid));
        let written = (|| {
            std::fs::create_dir_all(&of_job)?;
            std::fs::write(&unfinished, serde_json::to_vec(&record).map_err(io::Error::other)?)?;
            // A reader finds a whole file, or the one before.
            std::fs::rename(&unfinished, &file)
        })();
        written.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))?;
        files.push(file);
    }
    Ok(files)
}

/// Reads the records in a folder that [`Comm`](crate::Comm)s have written to, by job and rank.
///
/// # Errors
/// The folder cannot be read, or a file in it is no record of this version.
pub fn read(folder: &Path) -> io::Result<Vec<(PathBuf, Record)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            found.extend(read(&path)?);
        } else if name.starts_with("rank_") && name.ends_with(".json") {
            let named = |why: String| io::Error::other(format!("{}: {why}", path.display()));
            let record: Record =
                serde_json::from_slice(&std::fs::read(&path)?).map_err(|e| named(format!("no record: {e}")))?;
            if record.report.version != VERSION {
                return Err(named(format!("version {}, expected {VERSION}", record.report.version)));
            }
            if record.report.jobs.len() != 1 || record.calls.len() != record.report.comms.len() {
                return Err(named("expected one job, and the calls of each communicator".to_owned()));
            }
            found.push((path, record));
        }
    }
    found.sort_by(|(_, a), (_, b)| (&a.report.jobs[0].job, a.rank).cmp(&(&b.report.jobs[0].job, b.rank)));
    Ok(found)
}
