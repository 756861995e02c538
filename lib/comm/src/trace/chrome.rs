//! Events as lines of Chrome's trace event format.
//!
//! Source: "Trace Event Format" (Google, document 1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), and what Perfetto's
//! importer makes of it (`src/trace_processor/importers/json`).

use std::cmp::Reverse;
use std::fmt;
use std::io::{self, Write};

use serde_json::json;

use super::event::{Call, Content, Event, NONE, Span, Step, Track};
use super::file::{self, Lines};
use super::source::{Link, Source};
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::wire::{Algorithm, Collective, Header};

/// Appends a communicator's events to the rank's file.
pub(super) fn write(source: &Source, links: &[Link], events: &mut [Event], dropped: u64, failure: Option<&str>) {
    let sink = &source.sink;
    let Some(path) = sink.target() else {
        log::debug!("rank {}: {} events recorded before there was a file are lost", sink.rank, events.len());
        return;
    };
    // A slice must come after the one that it lies in; what lies inside was recorded first.
    events.reverse();
    events.sort_by_key(|e| (e.begin, Reverse(e.end)));
    let page = Page { source, links, pid: sink.pid() };
    let written = file::append(path, |lines| page.write(lines, events, dropped, failure));
    if let Err(e) = written {
        log::warn!("rank {}: {} events of the trace are lost: {e}", sink.rank, events.len());
    }
}

/// Microseconds with nanoseconds behind the point. Perfetto multiplies by 1000 and cuts the rest off, which must not
/// make one nanosecond less of it: the last digit, a tenth of a nanosecond, prevents that.
struct Micros(i64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.unsigned_abs();
        let sign = if self.0 < 0 { "-" } else { "" };
        write!(f, "{sign}{}.{:03}1", ns / 1000, ns % 1000)
    }
}

struct Page<'a> {
    source: &'a Source,
    links: &'a [Link],
    pid: usize,
}

impl Page<'_> {
    fn write(&self, lines: &mut Lines, events: &[Event], dropped: u64, failure: Option<&str>) -> io::Result<()> {
        let sink = &self.source.sink;
        let mut tracks: Vec<Track> = events.iter().map(|e| e.track).collect();
        tracks.sort_unstable();
        tracks.dedup();
        self.metadata(lines, "process_name", 0, "name", &json!(sink.process()))?;
        self.metadata(lines, "process_sort_index", 0, "sort_index", &json!(sink.rank))?;
        for &track in &tracks {
            let tid = self.tid(track);
            self.metadata(lines, "thread_name", tid, "name", &json!(self.track_name(track)))?;
            self.metadata(lines, "thread_sort_index", tid, "sort_index", &json!(tid))?;
        }
        for event in events {
            self.event(lines, event)?;
        }
        let last = events.iter().map(|e| e.end).max().unwrap_or_else(super::now);
        if let Some(text) = failure {
            self.instant(lines, last, Track::Calls, "failed", &json!({ "error": text }))?;
        }
        let clock = sink.clock();
        let args = json!({
            "events": events.len(),
            "dropped": dropped,
            "clock_offset_ns": clock.ns,
            "clock_uncertainty_ns": clock.uncertainty_ns,
        });
        let track = tracks.first().copied().unwrap_or(Track::Calls);
        let name =
            if dropped > 0 { format!("written, {dropped} earlier events dropped") } else { "written".to_owned() };
        self.instant(lines, last, track, &name, &args)
    }

    fn tid(&self, track: Track) -> u64 {
        self.source.sink.tid(self.source.comm, track)
    }

    fn track_name(&self, track: Track) -> String {
        let comm = self.source.comm;
        let of = |what: String| if comm == 0 { what } else { format!("comm {comm} {what}") };
        match track {
            Track::Calls => of("calls".to_owned()),
            Track::Lane(n) => of(format!("lane {n}")),
            Track::Thread(n) => of(format!("thread {n}")),
        }
    }

    fn metadata(
        &self,
        lines: &mut Lines,
        kind: &str,
        tid: u64,
        key: &str,
        value: &serde_json::Value,
    ) -> io::Result<()> {
        let pid = self.pid;
        let tid = if tid == 0 { String::new() } else { format!(",\"tid\":{tid}") };
        write!(lines.next()?, "{{\"ph\":\"M\",\"pid\":{pid}{tid},\"name\":\"{kind}\",\"args\":{{\"{key}\":{value}}}}}")
    }

    fn instant(
        &self,
        lines: &mut Lines,
        ns: u64,
        track: Track,
        name: &str,
        args: &serde_json::Value,
    ) -> io::Result<()> {
        let (pid, tid, ts, name) = (self.pid, self.tid(track), self.time(ns), json!(name));
        let s = "t";
        write!(
            lines.next()?,
            "{{\"ph\":\"i\",\"s\":\"{s}\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts},\"cat\":\"trace\",\"name\":{name},\"args\":{args}}}"
        )
    }

    fn time(&self, ns: u64) -> Micros {
        Micros(self.source.sink.time(ns))
    }

    /// A slice. `name` must need no escapes; `args` is the inside of an object.
    fn slice(
        &self,
        lines: &mut Lines,
        e: &Event,
        cat: &str,
        name: impl fmt::Display,
        args: impl fmt::Display,
    ) -> io::Result<()> {
        let (pid, tid, ts, dur) = (self.pid, self.tid(e.track), self.time(e.begin), Micros((e.end - e.begin) as i64));
        write!(
            lines.next()?,
            "{{\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\"ts\":{ts},\"dur\":{dur},\"cat\":\"{cat}\",\"name\":\"{name}\",\"args\":{{{args}}}}}"
        )
    }

    fn peer(&self, link: u32) -> Option<&Link> {
        self.links.get(link as usize)
    }

    /// `for rank 2`, or nothing.
    fn whom(&self, preposition: &str, link: u32) -> String {
        self.peer(link).map_or(String::new(), |l| format!(" {preposition} rank {}", l.peer))
    }

    fn event(&self, lines: &mut Lines, e: &Event) -> io::Result<()> {
        let comm = self.source.comm;
        match e.content {
            Content::Call(call) => self.slice(lines, e, "call", call, CallArgs { call, source: self.source }),
            Content::Group { calls } => {
                self.slice(lines, e, "call", format_args!("group of {calls} calls"), format_args!("\"comm\":{comm}"))
            }
            Content::Step(step) => self.step(lines, e, &step),
            Content::Wait { link, room } => {
                let what = if room { "wait for room" } else { "wait" };
                let name = format!("{what}{}", self.whom(if room { "at" } else { "for" }, link));
                self.slice(lines, e, "wait", name, "")
            }
            Content::Idle { phase, link } => {
                self.slice(lines, e, phase.name(), format_args!("{}{}", phase.name(), self.whom("for", link)), "")
            }
            Content::Await { rank, arrival } => {
                let what = if arrival { "wait for rank" } else { "wait for the end of rank" };
                self.slice(lines, e, "wait", format_args!("{what} {rank}"), "")
            }
            Content::Compile { collective } => {
                self.slice(lines, e, "setup", format_args!("compile {}", name_of(collective)), "")
            }
            Content::Connect { link, kind } => {
                let channel = self.peer(link).map_or(0, |l| l.channel);
                let args = format!("\"channel\":{channel},\"kind\":\"{kind}\"");
                self.slice(lines, e, "setup", format_args!("connect{}", self.whom("to", link)), args)
            }
            Content::Span(span) => self.span(lines, e, span),
        }
    }

    fn step(&self, lines: &mut Lines, e: &Event, step: &Step) -> io::Result<()> {
        let Step { kind, done, part, seq, window, bytes, work_ns, recv, send, received, sent } = *step;
        let mut args = format!("\"seq\":{seq}");
        if let Some(link) = self.peer(recv) {
            args.push_str(&format!(",\"from\":{}", link.peer));
        }
        if let Some(link) = self.peer(send) {
            args.push_str(&format!(",\"to\":{}", link.peer));
        }
        args.push_str(&format!(",\"part\":{part},\"window\":{window},\"bytes\":{bytes}"));
        let unfinished = if done { "" } else { " (unfinished)" };
        self.slice(lines, e, "step", format_args!("{}{unfinished}", kind.name()), args)?;
        // Arrows begin where the message can leave at the earliest and end where it is here at the latest, both behind
        // any wait inside the slice: so they never go back in time.
        let (first, last) = (self.time(e.end - u64::from(work_ns)), self.time(e.end - 1));
        let rank = self.source.sink.rank;
        if let Some(link) = self.peer(recv).filter(|_| received != NONE) {
            self.flow(lines, e, &last, "f\",\"bp\":\"e", self.message(link.channel, link.peer, rank, received))?;
        }
        if let Some(link) = self.peer(send).filter(|_| sent != NONE) {
            self.flow(lines, e, &first, "s", self.message(link.channel, rank, link.peer, sent))?;
        }
        Ok(())
    }

    fn flow(&self, lines: &mut Lines, e: &Event, at: &Micros, ph: &str, id: u64) -> io::Result<()> {
        let (pid, tid) = (self.pid, self.tid(e.track));
        write!(
            lines.next()?,
            "{{\"ph\":\"{ph}\",\"pid\":{pid},\"tid\":{tid},\"ts\":{at},\"cat\":\"message\",\"name\":\"message\",\"id\":\"{id:#x}\"}}"
        )
    }

    /// Id of a message, equal at both ends.
    fn message(&self, channel: u32, sender: usize, receiver: usize, number: u32) -> u64 {
        let parts =
            [u64::from(self.source.comm), u64::from(channel), sender as u64, receiver as u64, u64::from(number)];
        parts.into_iter().fold(0, |h, part| mix(h ^ part))
    }

    fn span(&self, lines: &mut Lines, e: &Event, span: Span) -> io::Result<()> {
        match span {
            Span::Start => self.slice(lines, e, "setup", "start", ""),
            Span::LateWake { peer } => self.slice(lines, e, "wait", format_args!("lost wake-up from rank {peer}"), ""),
            Span::Split => self.slice(lines, e, "setup", "split", ""),
            Span::Drain => self.slice(lines, e, "queue", "wait for queued calls", ""),
            Span::BucketReady { bucket, bytes } => {
                self.slice(lines, e, "ddp", format_args!("bucket {bucket} ready"), format_args!("\"bytes\":{bytes}"))
            }
            Span::Finish => self.slice(lines, e, "ddp", "finish", ""),
            Span::BucketWait { bucket } => self.slice(lines, e, "ddp", format_args!("wait for bucket {bucket}"), ""),
            Span::Carried { collective, calls, bytes, by } => self.slice(
                lines,
                e,
                "carried",
                name_of(collective),
                format_args!("\"by\":\"{by}\",\"calls\":{calls},\"bytes\":{bytes}"),
            ),
            Span::Queued { collective, bytes } => {
                // Asynchronous slices have separate tracks, where they may overlap.
                let pid = self.pid;
                let id = mix(e.begin ^ mix(u64::from(self.source.comm)) ^ mix(self.source.sink.rank as u64));
                let name = format!("queued {}", name_of(collective));
                for (ph, ns) in [("b", e.begin), ("e", e.end)] {
                    let ts = self.time(ns);
                    write!(
                        lines.next()?,
                        "{{\"ph\":\"{ph}\",\"pid\":{pid},\"ts\":{ts},\"cat\":\"queue\",\"name\":\"{name}\",\"id\":\"{id:#x}\",\"args\":{{\"bytes\":{bytes}}}}}"
                    )?;
                }
                Ok(())
            }
        }
    }
}

/// splitmix64's finalizer (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn name_of(collective: u8) -> &'static str {
    Collective::from_code(collective).map_or("call", Collective::name)
}

impl Call {
    /// The parts of its header that say what `count` and `root` are.
    fn header(&self) -> Header {
        let Call { count, root, collective, algorithm, .. } = *self;
        Header { count, root, collective, algorithm, ..Header::default() }
    }

    fn bytes(&self) -> u64 {
        self.header().elements() * DType::from_code(self.dtype).map_or(1, |d| d.size() as u64)
    }
}

/// `all_reduce #12 4 MiB f32 sum`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} {}", name_of(self.collective), self.seq, Size(self.bytes()))?;
        if let Some(dtype) = DType::from_code(self.dtype) {
            write!(f, " {dtype}")?;
        }
        match ReduceOp::from_code(self.op) {
            Some(op) => write!(f, " {op}"),
            None => Ok(()),
        }
    }
}

struct CallArgs<'a> {
    call: Call,
    source: &'a Source,
}

impl fmt::Display for CallArgs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { seq, root, windows, message, algorithm, .. } = self.call;
        let (comm, bytes, header) = (self.source.comm, self.call.bytes(), self.call.header());
        let count = header.elements();
        if let Some(algorithm) = Algorithm::from_code(algorithm) {
            write!(f, "\"algorithm\":\"{algorithm}\",")?;
        }
        write!(f, "\"comm\":{comm},\"seq\":{seq},\"bytes\":{bytes},\"count\":{count}")?;
        if let Some(program) = header.program() {
            write!(f, ",\"program\":\"{program:014x}\"")?;
        } else if let Some((calls, _)) = header.pack() {
            write!(f, ",\"calls\":{calls}")?;
        } else if root != Header::NO_ROOT {
            write!(f, ",\"root\":{}", self.source.world(root as usize))?;
        }
        write!(f, ",\"windows\":{windows},\"largest_message\":{message}")
    }
}

/// Bytes for people.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            n if n >= 1 << 30 => (1u64 << 30, "GiB"),
            n if n >= 1 << 20 => (1 << 20, "MiB"),
            n if n >= 1 << 10 => (1 << 10, "KiB"),
            n => return write!(f, "{n} B"),
        };
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {name}", self.0 / unit)
        } else {
            write!(f, "{:.1} {name}", self.0 as f64 / unit as f64)
        }
    }
}
