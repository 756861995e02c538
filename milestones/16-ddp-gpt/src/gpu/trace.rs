//! Timeline of a step on the GPU: stamps of its clock around parts of a step, as a file for <https://ui.perfetto.dev>.
//! A stamp is a kernel of one thread, so a traced step is a little longer.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::device::Array;
use super::kernels::{Grid, args};
use super::network::Network;

/// Stamps of a step at most.
const MOST: usize = 512;

/// A part of a step.
struct Span {
    name: String,
    side: bool,
    from: usize,
    to: usize,
}

/// Stamps of the last step, where they are wanted; else nothing happens here.
pub struct Trace {
    stamps: Option<Array<u64>>,
    used: Cell<usize>,
    spans: RefCell<Vec<Span>>,
}

/// Begin and end of a span, in microseconds since the step's begin.
#[derive(Clone, Copy)]
struct Times {
    side: bool,
    begin: f64,
    end: f64,
}

/// Overlap of the averaging with the passes, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overlap {
    /// From the first stamp to the last.
    pub step: f64,
    /// All averages together.
    pub averaging: f64,
    /// Part of `averaging` while the passes ran too.
    pub hidden: f64,
    /// Time that the passes waited at their end.
    pub waited: f64,
}

impl Overlap {
    /// `waiting`: number of the span in which the passes wait.
    fn of(times: &[Times], waiting: Option<usize>) -> Overlap {
        let begin = times.iter().map(|t| t.begin).fold(f64::INFINITY, f64::min).min(f64::MAX);
        let end = times.iter().map(|t| t.end).fold(begin, f64::max);
        let working = |(i, t): &(usize, &Times)| !t.side && Some(*i) != waiting;
        let busy: Vec<&Times> = times.iter().enumerate().filter(working).map(|(_, t)| t).collect();
        let averages: Vec<&Times> = times.iter().filter(|t| t.side).collect();
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
        let Overlap { step, averaging, hidden, waited } = self;
        let share = 100.0 * hidden / averaging.max(1e-9);
        write!(
            f,
            "the last step took {step:.0} us; averages {averaging:.0} us, {share:.0} % of that beside the passes, "
        )?;
        write!(f, "which waited {waited:.0} us at their end")
    }
}

/// Name of the span in which the passes wait for the averages.
pub const WAITING: &str = "wait for averages";

impl Trace {
    /// Room for the stamps of a step, if it is to be traced.
    pub fn new(network: &Network, wanted: bool) -> Result<Trace> {
        let stamps = if wanted { Some(Array::new(&network.gpu, MOST)?) } else { None };
        Ok(Trace { stamps, used: Cell::new(0), spans: RefCell::default() })
    }

    /// A new step: what was stamped before is forgotten.
    pub fn begin(&self) {
        self.used.set(0);
        self.spans.borrow_mut().clear();
    }

    /// Enqueues a stamp, on the passes' stream or on the averaging one; gives its number.
    pub fn stamp(&self, network: &Network, side: bool) -> Result<usize> {
        let Some(stamps) = &self.stamps else { return Ok(0) };
        let number = self.used.get();
        ensure!(number < MOST, "more than {MOST} stamps in a step");
        self.used.set(number + 1);
        let stream = if side { &network.gpu.side } else { &network.gpu.stream };
        network.kernels.launch(stream, "stamp", Grid::ONE, args![stamps.place(number)])?;
        Ok(number)
    }

    /// Names the time since stamp `from`; gives the stamp at its end.
    pub fn span(&self, network: &Network, name: impl FnOnce() -> String, side: bool, from: usize) -> Result<usize> {
        let to = self.stamp(network, side)?;
        if self.stamps.is_some() {
            self.spans.borrow_mut().push(Span { name: name(), side, from, to });
        }
        Ok(to)
    }

    /// Writes the last step's spans in Google's "Trace Event Format": complete events ("X", microseconds) and names of
    /// tracks ("M").
    pub fn save(&self, network: &Network, rank: usize, path: &Path) -> Result<Option<Overlap>> {
        let Some(stamps) = &self.stamps else { return Ok(None) };
        let stamps = stamps.read(&network.gpu, 0, self.used.get())?;
        let start = stamps.iter().copied().min().unwrap_or(0);
        let us = |i: usize| (stamps[i] - start) as f64 / 1e3;
        let spans = self.spans.borrow();
        let times: Vec<Times> =
            spans.iter().map(|s| Times { side: s.side, begin: us(s.from), end: us(s.to) }).collect();
        let process = format!("rank {rank}, {}", network.gpu.describe());
        let tracks =
            [(0, "process_name", process.as_str()), (0, "thread_name", "passes"), (1, "thread_name", "averaging")];
        let names = tracks.map(
            |(tid, name, label)| json!({ "name": name, "ph": "M", "pid": rank, "tid": tid, "args": { "name": label } }),
        );
        let complete = spans.iter().zip(&times).map(|(span, t)| {
            let (tid, dur) = (u32::from(span.side), t.end - t.begin);
            json!({ "name": span.name, "ph": "X", "pid": rank, "tid": tid, "ts": t.begin, "dur": dur })
        });
        let events: Vec<_> = names.into_iter().chain(complete).collect();
        let written = File::create(path).map(|file| serde_json::to_writer(BufWriter::new(file), &events));
        written.and_then(|done| Ok(done?)).with_context(|| format!("cannot write the trace {}", path.display()))?;
        Ok(Some(Overlap::of(&times, spans.iter().position(|s| s.name == WAITING))))
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
