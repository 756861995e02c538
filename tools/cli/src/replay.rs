//! `replay`: a page that plays a run, or two side by side, from their traces.

use std::path::{Path, PathBuf};

use ::replay::{EVENTS, Recording, page};
use anyhow::{Context as _, Result};
use clap::Args;
use program_kit::output::Output;

/// Bytes of an event in a trace: 170 to 230 were measured.
const EVENT_BYTES: u64 = 200;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The traces of one or two runs, as TINYNCCL_TRACE=FILE writes them.
    #[arg(required = true, num_args = 1..=2, value_name = "TRACE.json")]
    traces: Vec<PathBuf>,
    /// File to write the page to.
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
    /// Largest number of events of each trace; the page keeps the last ones.
    #[arg(long, default_value_t = EVENTS, value_parser = events)]
    events: usize,
}

fn events(text: &str) -> Result<usize, String> {
    let expected = || "expected 1 to 1000000 events".to_owned();
    text.parse().ok().filter(|n| (1..=1_000_000).contains(n)).ok_or_else(expected)
}

pub(crate) fn run(options: &Options) -> Result<()> {
    for trace in &options.traces {
        if let Some(line) = cut(trace, options.events)? {
            eprintln!("{line}");
        }
    }
    let output = Output::create(&options.html)?;
    let runs: Vec<Recording> =
        options.traces.iter().map(|trace| Recording::read(trace, options.events)).collect::<Result<_>>()?;
    output.finish(page(&runs).as_bytes())?;
    for run in &runs {
        crate::print(&format!("{}: {run}\n", run.title))?;
        for note in &run.notes {
            crate::print(&format!("  {note}\n"))?;
        }
    }
    crate::print(&format!("page: {}\n", options.html.display()))
}

/// A line where a trace is longer than the page will be, before it is read.
fn cut(trace: &Path, most: usize) -> Result<Option<String>> {
    let bytes = std::fs::metadata(trace).with_context(|| format!("reading {}", trace.display()))?.len();
    let events = bytes / EVENT_BYTES;
    Ok((events > 2 * most as u64).then(|| {
        format!(
            "{}: {:.1} MB, about {events} events: the page will play the last {most} of them (--events)",
            trace.display(),
            bytes as f64 / 1e6
        )
    }))
}
