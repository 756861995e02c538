//! What ran when on the GPU: stamps of its clock around parts of a step, as a file for <https://ui.perfetto.dev>. A stamp is a
//! kernel of one thread, so a traced step is a little longer.

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

/// An event of the trace format: microseconds, complete ("X") events.
#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'static str,
    pid: usize,
    tid: &'static str,
    ts: f64,
    dur: f64,
}

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
    pub fn save(&self, gpu: &Gpu, rank: usize, path: &Path) -> Result<()> {
        let stamps = self.stamps.read(gpu, 0, self.used)?;
        let start = stamps.iter().copied().min().unwrap_or(0);
        let us = |i: usize| (stamps[i] - start) as f64 / 1e3;
        let events: Vec<Event<'_>> = self
            .spans
            .iter()
            .map(|s| Event {
                name: &s.name,
                ph: "X",
                pid: rank,
                tid: if s.side { "averaging" } else { "passes" },
                ts: us(s.from),
                dur: us(s.to) - us(s.from),
            })
            .collect();
        let file = File::create(path).with_context(|| format!("cannot write the trace {}", path.display()))?;
        serde_json::to_writer(BufWriter::new(file), &events).with_context(|| format!("cannot write {}", path.display()))
    }
}
