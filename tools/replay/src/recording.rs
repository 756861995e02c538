//! The part of a trace to show: ranks, tracks, slices, messages and calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use anyhow::{Result, ensure};

use crate::cut::{self, Cut};
use crate::events::{self, Event};

/// Why a rank did not go on, as the trace names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// A message, or another rank's arrival, is not there.
    Message,
    /// A rank has not taken earlier messages.
    Room,
    /// A rank is not done with its part of a call in shared memory.
    Departure,
    /// A wake-up was lost.
    LostWake,
    /// Looks at the links again and again.
    Spin,
    /// Gives the core away between looks.
    Yield,
    /// Sleeps until it is woken.
    Sleep,
    /// Queued calls come first.
    Queue,
    /// A bucket of gradients.
    Bucket,
}

impl Cause {
    /// In the order of the page's legend.
    pub const ALL: [Cause; 9] = [
        Cause::Message,
        Cause::Room,
        Cause::Departure,
        Cause::LostWake,
        Cause::Spin,
        Cause::Yield,
        Cause::Sleep,
        Cause::Queue,
        Cause::Bucket,
    ];

    /// Name in the page's legend.
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Message => "wait for a rank",
            Cause::Room => "wait for room at a rank",
            Cause::Departure => "wait for the end of a rank",
            Cause::LostWake => "lost wake-up",
            Cause::Spin => "spin",
            Cause::Yield => "yield",
            Cause::Sleep => "sleep",
            Cause::Queue => "wait for queued calls",
            Cause::Bucket => "wait for a bucket",
        }
    }
}

/// Kind of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A call, or a group of calls.
    Call,
    /// A call that kernels, NCCL or MPI execute.
    Carried,
    /// A step of a lane.
    Step,
    /// Joining, connecting, compiling a plan, splitting.
    Setup,
    /// A stage of data parallelism.
    Ddp,
    /// Anything else.
    Other,
    /// The rank does not go on.
    Wait(Cause),
}

impl Kind {
    fn of(cat: &str, name: &str) -> Kind {
        match cat {
            "call" => Kind::Call,
            "carried" => Kind::Carried,
            "step" => Kind::Step,
            "setup" => Kind::Setup,
            "spin" => Kind::Wait(Cause::Spin),
            "yield" => Kind::Wait(Cause::Yield),
            "sleep" => Kind::Wait(Cause::Sleep),
            "queue" => Kind::Wait(Cause::Queue),
            "wait" if name.starts_with("wait for room") => Kind::Wait(Cause::Room),
            "wait" if name.starts_with("wait for the end") => Kind::Wait(Cause::Departure),
            "wait" if name.starts_with("lost wake-up") => Kind::Wait(Cause::LostWake),
            "wait" => Kind::Wait(Cause::Message),
            "ddp" if name.starts_with("wait for bucket") => Kind::Wait(Cause::Bucket),
            "ddp" => Kind::Ddp,
            _ => Kind::Other,
        }
    }

    fn is_call(self) -> bool {
        matches!(self, Kind::Call | Kind::Carried)
    }
}

/// A rank of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rank {
    /// World rank.
    pub rank: u64,
    /// With its host and process.
    pub name: String,
}

/// A line of a rank: its calls, a lane, a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Track {
    /// Index into [`Recording::ranks`].
    pub rank: usize,
    /// As the trace names it.
    pub name: String,
}

/// Something that took from `begin` to `end`, in nanoseconds of the trace's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Index into [`Recording::tracks`].
    pub track: usize,
    /// Begin, in nanoseconds of the trace's clock.
    pub begin: i64,
    /// End, in nanoseconds of the trace's clock.
    pub end: i64,
    /// Call, step, wait or other kind.
    pub kind: Kind,
    /// Index into [`Recording::names`].
    pub name: usize,
    /// Bytes of a call or a step; 0 if the trace names none.
    pub bytes: u64,
    /// Number of a step within its call on its lane, from 1 on; 0 for other slices.
    pub round: usize,
}

/// A message from a step to another rank's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Index of the slice that sends.
    pub from: usize,
    /// Index of the slice that receives.
    pub to: usize,
    /// Earliest time of departure, in nanoseconds of the trace's clock.
    pub left: i64,
    /// Latest time of arrival, in nanoseconds of the trace's clock.
    pub there: i64,
}

/// A call over all ranks that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallSpan {
    /// Begin on the first rank.
    pub begin: i64,
    /// End on the last one.
    pub end: i64,
    /// Index into [`Recording::names`].
    pub name: usize,
    /// Ranks that made it.
    pub ranks: usize,
}

/// The end of a communicator on a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Index into [`Recording::ranks`].
    pub rank: usize,
    /// Time of the record, in nanoseconds of the trace's clock.
    pub at: i64,
    /// The error.
    pub error: String,
}

/// A run, or the end of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    /// The file's name.
    pub title: String,
    /// In the order of their numbers.
    pub ranks: Vec<Rank>,
    /// Tracks of all ranks, rank by rank.
    pub tracks: Vec<Track>,
    /// Names of slices and calls.
    pub names: Vec<String>,
    /// By track and begin; what contains others is before them.
    pub slices: Vec<Slice>,
    /// By the time when they left.
    pub messages: Vec<Message>,
    /// By begin.
    pub calls: Vec<CallSpan>,
    /// In the order of the trace file.
    pub failures: Vec<Failure>,
    /// Earlier slices were left out, or forgotten.
    pub cut: bool,
    /// Remarks for the reader, such as where the trace was cut.
    pub notes: Vec<String>,
}

impl Recording {
    /// Reads a trace, of which the last `most` slices stay.
    ///
    /// # Errors
    /// The file cannot be read, is no trace, or has nothing to play.
    pub fn read(path: &Path, most: usize) -> Result<Recording> {
        let cut = cut::find(path, most)?;
        let mut reading = Reading { cut: cut.from, ..Reading::default() };
        let whole = events::each(path, |event| reading.event(event))?;
        let title = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let mut recording = reading.end();
        ensure!(!recording.slices.is_empty(), "{}: nothing to play: no call, step or wait is in it", path.display());
        recording.title = title;
        recording.note(&cut, whole);
        Ok(recording)
    }

    /// First and last time of anything in it.
    pub fn span(&self) -> (i64, i64) {
        let begin = self.slices.iter().map(|s| s.begin).min().unwrap_or_default();
        (begin, self.slices.iter().map(|s| s.end).max().unwrap_or_default())
    }

    fn note(&mut self, cut: &Cut, whole: bool) {
        let mut notes = Vec::new();
        let shown = self.slices.len();
        self.cut = cut.slices > shown || cut.dropped > 0;
        if cut.slices > shown {
            notes.push(format!(
                "Cut: the trace has {} events, and this page plays the last {shown} of them; --events N keeps others.",
                cut.slices
            ));
        }
        if cut.dropped > 0 {
            notes.push(format!(
                "The ranks had forgotten {} earlier events when they wrote; TINYNCCL_TRACE_EVENTS lets them keep more.",
                cut.dropped
            ));
        }
        if !whole {
            notes.push("The trace ends in the middle of a line: the rank that wrote last was killed.".to_owned());
        }
        notes.append(&mut self.notes);
        self.notes = notes;
    }
}

/// `4 ranks, 12 calls, 96 messages`.
impl std::fmt::Display for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cut = if self.cut { ", the end of the run" } else { "" };
        write!(f, "{} ranks, {} calls, {} messages{cut}", self.ranks.len(), self.calls.len(), self.messages.len())
    }
}

#[derive(Debug, Default)]
struct Reading {
    cut: i64,
    ranks: BTreeMap<u64, (Option<u64>, String)>,
    /// By thread number: the process, and the name.
    threads: BTreeMap<u64, (u64, String)>,
    names: HashMap<String, usize>,
    list: Vec<String>,
    slices: Vec<Raw>,
    /// The last slice of each thread that was read, if it is shown: a message's ends follow their steps.
    last: HashMap<u64, Option<usize>>,
    sent: HashMap<String, (usize, i64)>,
    received: HashMap<String, (usize, i64)>,
    failures: Vec<(u64, i64, String)>,
    /// Ranks that others sent to, received from or waited for.
    met: BTreeSet<u64>,
    uncertain: u64,
}

#[derive(Debug)]
struct Raw {
    pid: u64,
    tid: u64,
    begin: i64,
    end: i64,
    kind: Kind,
    name: usize,
    bytes: u64,
    /// Sequence number of a call or a step.
    seq: u64,
    comm: u64,
}

impl Reading {
    fn event(&mut self, event: Event) {
        match (event.ph.as_str(), event.name.as_str()) {
            ("M", "process_name") => {
                self.ranks.entry(event.pid).or_default().1 = event.args.name.unwrap_or_default();
            }
            ("M", "process_sort_index") => self.ranks.entry(event.pid).or_default().0 = event.args.sort_index,
            ("M", "thread_name") => {
                self.threads.insert(event.tid, (event.pid, event.args.name.unwrap_or_default()));
            }
            ("X", _) => self.slice(event),
            ("s", _) => self.arrow(event, true),
            ("f", _) => self.arrow(event, false),
            ("i", "failed") => {
                self.failures.push((event.pid, event.begin(), event.args.error.unwrap_or_default()));
            }
            ("i", _) => self.uncertain = self.uncertain.max(event.args.clock_uncertainty_ns.unwrap_or_default()),
            _ => {}
        }
    }

    fn slice(&mut self, event: Event) {
        let (begin, end) = (event.begin(), event.end());
        let shown = end > self.cut;
        self.last.insert(event.tid, shown.then_some(self.slices.len()));
        if !shown {
            return;
        }
        let kind = Kind::of(&event.cat, &event.name);
        let args = event.args;
        let awaited = event.name.rsplit_once(" rank ").and_then(|(_, rank)| rank.parse().ok());
        self.met.extend([args.from, args.to, awaited.filter(|_| matches!(kind, Kind::Wait(_)))].into_iter().flatten());
        let name = match (kind, &args) {
            (Kind::Step, args) => {
                let mut name = event.name;
                for (word, peer) in [(" from ", args.from), (" to ", args.to)] {
                    if let Some(peer) = peer {
                        name += &format!("{word}{peer}");
                    }
                }
                name
            }
            (Kind::Call, events::Args { algorithm: Some(algorithm), .. }) => format!("{} ({algorithm})", event.name),
            (Kind::Carried, events::Args { by: Some(by), .. }) => format!("{} ({by})", event.name),
            _ => event.name,
        };
        let name = self.named(name);
        self.slices.push(Raw {
            pid: event.pid,
            tid: event.tid,
            begin,
            end,
            kind,
            name,
            bytes: args.bytes.unwrap_or_default(),
            seq: args.seq.unwrap_or_default(),
            comm: args.comm.unwrap_or_default(),
        });
    }

    fn named(&mut self, name: String) -> usize {
        let next = self.list.len();
        *self.names.entry(name).or_insert_with_key(|name| {
            self.list.push(name.clone());
            next
        })
    }

    fn arrow(&mut self, event: Event, leaves: bool) {
        if let Some(&Some(slice)) = self.last.get(&event.tid) {
            let at = event.begin();
            let ends = if leaves { &mut self.sent } else { &mut self.received };
            ends.insert(event.id, (slice, at));
        }
    }

    fn end(self) -> Recording {
        let Reading { ranks, threads, list: names, slices: raw, sent, mut received, failures, met, uncertain, .. } =
            self;
        let mut processes: Vec<(u64, Rank)> =
            ranks.into_iter().map(|(pid, (rank, name))| (pid, Rank { rank: rank.unwrap_or(pid), name })).collect();
        processes.sort_by_key(|(_, rank)| rank.rank);
        let index: HashMap<u64, usize> = processes.iter().enumerate().map(|(i, (pid, _))| (*pid, i)).collect();
        let mut order: Vec<usize> = (0..raw.len()).collect();
        order.retain(|&i| threads.contains_key(&raw[i].tid) && index.contains_key(&raw[i].pid));
        order.sort_by_key(|&i| (index[&raw[i].pid], raw[i].tid, raw[i].begin, -raw[i].end));
        let rounds = rounds(&raw, &order, &threads);
        // Tracks without a slice are left out.
        let used: HashSet<u64> = raw.iter().map(|s| s.tid).collect();
        let mut known: Vec<(usize, u64, String)> = threads
            .into_iter()
            .filter(|(tid, _)| used.contains(tid))
            .filter_map(|(tid, (pid, name))| Some((*index.get(&pid)?, tid, name)))
            .collect();
        known.sort_unstable_by_key(|(rank, tid, _)| (*rank, *tid));
        let track_of: HashMap<u64, usize> = known.iter().enumerate().map(|(i, (_, tid, _))| (*tid, i)).collect();
        let tracks: Vec<Track> = known.into_iter().map(|(rank, _, name)| Track { rank, name }).collect();

        let place: HashMap<usize, usize> = order.iter().enumerate().map(|(new, &old)| (old, new)).collect();
        let slices: Vec<Slice> = order
            .iter()
            .zip(rounds)
            .map(|(&i, round)| {
                let Raw { tid, begin, end, kind, name, bytes, .. } = raw[i];
                Slice { track: track_of[&tid], begin, end, kind, name, bytes, round }
            })
            .collect();
        let arrows = sent.len() + received.len();
        let mut messages: Vec<Message> = sent
            .into_iter()
            .filter_map(|(id, (from, left))| {
                let (to, there) = received.remove(&id)?;
                Some(Message { from: *place.get(&from)?, to: *place.get(&to)?, left, there: there.max(left) })
            })
            .collect();
        messages.sort_by_key(|m| (m.left, m.there, m.from, m.to));
        let mut notes = Vec::new();
        let silent = met.iter().filter(|rank| processes.iter().all(|(_, known)| known.rank != **rank));
        let silent: Vec<String> = silent.map(u64::to_string).collect();
        if !silent.is_empty() {
            notes.push(format!("Nothing is recorded of rank {}: killed, or not traced.", silent.join(", ")));
        }
        match arrows - 2 * messages.len() {
            0 => {}
            lost => notes.push(format!(
                "{lost} messages have one end only in the part shown, and are not drawn: sent and not received, or the other \
                 way round."
            )),
        }
        if uncertain > 0 {
            notes.push(format!("The clocks of its hosts agree within {:.1} us.", uncertain as f64 / 1e3));
        }
        let failures = failures
            .into_iter()
            .filter_map(|(pid, at, error)| Some(Failure { rank: *index.get(&pid)?, at, error }))
            .collect();
        let calls = calls(&raw);
        let ranks = processes.into_iter().map(|(_, rank)| rank).collect();
        Recording { title: String::new(), ranks, tracks, names, slices, messages, calls, failures, notes, cut: false }
    }
}

/// The communicator's part of a track's name: that of `comm 2 lane 0` is `comm 2 `.
fn communicator(track: &str) -> &str {
    ["calls", "lane"].iter().find_map(|word| track.find(word)).map_or("", |end| &track[..end])
}

/// The number of each step within its call, on its lane, where a call's steps follow one another. 0 for other slices.
fn rounds(raw: &[Raw], order: &[usize], threads: &BTreeMap<u64, (u64, String)>) -> Vec<usize> {
    let lanes: HashSet<u64> = raw.iter().filter(|s| s.kind == Kind::Step).map(|s| s.tid).collect();
    let home = |tid| threads.get(&tid).map(|(pid, name)| (*pid, communicator(name)));
    // Begins of the calls on a lane itself, as those of a group are, and on the communicator's line of calls.
    let mut own: HashMap<u64, Vec<i64>> = HashMap::new();
    let mut all: HashMap<_, Vec<i64>> = HashMap::new();
    for slice in raw.iter().filter(|s| s.kind == Kind::Call) {
        match lanes.contains(&slice.tid) {
            true => own.entry(slice.tid).or_default().push(slice.begin),
            false => all.entry(home(slice.tid)).or_default().push(slice.begin),
        }
    }
    own.values_mut().chain(all.values_mut()).for_each(|begins| begins.sort_unstable());
    let (mut last, mut round) = (None, 0);
    let number = |&i: &usize| {
        let Raw { tid, begin, seq, kind, .. } = raw[i];
        if kind != Kind::Step {
            return 0;
        }
        let begins = own.get(&tid).or_else(|| all.get(&home(tid))).map_or(&[][..], Vec::as_slice);
        let this = Some((tid, seq, begins.partition_point(|&call| call <= begin)));
        round = if last == this { round + 1 } else { 1 };
        last = this;
        round
    };
    order.iter().map(number).collect()
}

/// The calls, each from its begin on the first rank to its end on the last one. A rank's calls of one name and number
/// are told apart by their order.
fn calls(raw: &[Raw]) -> Vec<CallSpan> {
    let mut made: Vec<&Raw> = raw.iter().filter(|s| s.kind.is_call()).collect();
    made.sort_by_key(|s| s.begin);
    let mut times: HashMap<(u64, u64, u64, usize), usize> = HashMap::new();
    let mut spans: HashMap<(u64, u64, usize, usize), CallSpan> = HashMap::new();
    for &&Raw { pid, begin, end, name, seq, comm, .. } in &made {
        let time = times.entry((pid, comm, seq, name)).or_default();
        *time += 1;
        let span = spans.entry((comm, seq, name, *time)).or_insert(CallSpan { begin, end, name, ranks: 0 });
        (span.begin, span.end, span.ranks) = (span.begin.min(begin), span.end.max(end), span.ranks + 1);
    }
    let mut spans: Vec<CallSpan> = spans.into_values().collect();
    spans.sort_by_key(|c| (c.begin, c.end, c.name));
    spans
}
