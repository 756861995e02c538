//! What ran when on the GPU: stamps of its clock around parts of a step, as a file for <https://ui.perfetto.dev>. A stamp is a
//! kernel of one thread, so a traced step is a little longer.

use std::fmt;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::device::Gpu;
use super::memory::Array;

/// Stamps of a step at most.
const MOST: usize = 512;

/// A part of a step.
#[derive(Debug)]
struct Span {
    name: String,
    side: bool,
    from: usize,
    to: usize,
}

/// Stamps of the last step.
#[derive(Debug)]
pub struct Trace {
    stamps: Array<u64>,
    used: usize,
    spans: Vec<Span>,
}

/// When a span ran, in microseconds since the step's begin.
#[derive(Debug, Clone, Copy)]
struct Times {
    side: bool,
    begin: f64,
    end: f64,
}

/// How much of the averaging the passes hid, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overlap {
    /// From the first stamp to the last.
    pub step: f64,
    /// All averages together.
    pub averaging: f64,
    /// Of that, while the passes ran too.
    pub hidden: f64,
    /// That the passes waited at their end.
    pub waited: f64,
}

impl Overlap {
    /// `waiting`: number of the span in which the passes wait.
    fn of(times: &[Times], waiting: Option<usize>) -> Overlap {
        let begin = times.iter().map(|t| t.begin).fold(f64::INFINITY, f64::min).min(f64::MAX);
        let end = times.iter().map(|t| t.end).fold(begin, f64::max);
        let busy: Vec<Times> =
            times.iter().enumerate().filter(|(i, t)| !t.side && Some(*i) != waiting).map(|(_, &t)| t).collect();
        let averages: Vec<Times> = times.iter().filter(|t| t.side).copied().collect();
        // Spans of one stream follow one another, so nothing is counted twice.
        let common = |a: &Times, b: &Times| (a.end.min(b.end) - a.begin.max(b.begin)).max(0.0);
        Overlap {
            step: end - begin,
            averaging: averages.iter().map(|a| a.end - a.begin).sum(),
            hidden: averages.iter().flat_map(|a| busy.iter().map(move |b| common(a, b))).sum(),
            waited: waiting.and_then(|i| times.get(i)).map_or(0.0, |t| t.end - t.begin),
        }
    }
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = 100.0 * self.hidden / self.averaging.max(1e-9);
        write!(
            f,
            "the last step took {:.0} us; averages {:.0} us, {share:.0} % of that beside the passes, which waited {:.0} us at their end",
            self.step, self.averaging, self.waited
        )
    }
}

/// A line of the trace format (Google's "Trace Event Format"): a complete event ("X", microseconds) or the name of a track ("M").
#[derive(Serialize)]
#[serde(untagged)]
enum Event<'a> {
    Span { name: &'a str, ph: &'static str, pid: usize, tid: u32, ts: f64, dur: f64 },
    Name { name: &'static str, ph: &'static str, pid: usize, tid: u32, args: Label },
}

#[derive(Serialize)]
struct Label {
    name: String,
}

/// What the span is called in which the passes wait for the averages.
pub const WAITING: &str = "wait for averages";

impl Trace {
    /// Room for the stamps of a step.
    pub fn new(gpu: &Gpu) -> Result<Trace> {
        Ok(Trace { stamps: Array::new(gpu, MOST)?, used: 0, spans: Vec::new() })
    }

    /// A new step: what was stamped before is forgotten.
    pub fn begin(&mut self) {
        self.used = 0;
        self.spans.clear();
    }

    /// The next stamp's number and its place.
    pub fn stamp(&mut self) -> Result<(usize, u64)> {
        anyhow::ensure!(self.used < MOST, "more than {MOST} stamps in a step");
        self.used += 1;
        Ok((self.used - 1, self.stamps.place(self.used - 1)))
    }

    /// Names the time between two stamps, on the passes' stream or on the averaging one.
    pub fn span(&mut self, name: String, side: bool, from: usize, to: usize) {
        self.spans.push(Span { name, side, from, to });
    }

    /// Writes the last step's spans.
    pub fn save(&self, gpu: &Gpu, rank: usize, path: &Path) -> Result<Overlap> {
        let stamps = self.stamps.read(gpu, 0, self.used)?;
        let start = stamps.iter().copied().min().unwrap_or(0);
        let us = |i: usize| (stamps[i] - start) as f64 / 1e3;
        let times: Vec<Times> =
            self.spans.iter().map(|s| Times { side: s.side, begin: us(s.from), end: us(s.to) }).collect();
        let tracks = [(0, "process_name", format!("rank {rank}, {}", gpu.describe()))]
            .into_iter()
            .chain([(0, "thread_name", "passes".to_owned()), (1, "thread_name", "averaging".to_owned())]);
        let names =
            tracks.map(|(tid, name, label)| Event::Name { name, ph: "M", pid: rank, tid, args: Label { name: label } });
        let spans = self.spans.iter().zip(&times).map(|(s, t)| Event::Span {
            name: &s.name,
            ph: "X",
            pid: rank,
            tid: s.side.into(),
            ts: t.begin,
            dur: t.end - t.begin,
        });
        let events: Vec<Event<'_>> = names.chain(spans).collect();
        let file = File::create(path).with_context(|| format!("cannot write the trace {}", path.display()))?;
        serde_json::to_writer(BufWriter::new(file), &events)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Overlap::of(&times, self.spans.iter().position(|s| s.name == WAITING)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_beside_the_passes_is_hidden() {
        let times = |side, begin, end| Times { side, begin, end };
        let spans = [
            times(false, 0.0, 10.0),
            times(false, 10.0, 30.0),
            times(true, 5.0, 15.0),  // beside both
            times(true, 25.0, 40.0), // 5 beside the second, the rest while the passes wait
            times(false, 30.0, 40.0),
            times(false, 40.0, 50.0),
        ];
        let overlap = Overlap::of(&spans, Some(4));
        assert_eq!(overlap, Overlap { step: 50.0, averaging: 25.0, hidden: 15.0, waited: 10.0 });
        assert!(overlap.to_string().contains("averages 25 us, 60 % of that beside"), "{overlap}");
        let nothing = Overlap { step: 0.0, averaging: 0.0, hidden: 0.0, waited: 0.0 };
        assert_eq!(Overlap::of(&[], None), nothing);
    }
}
