//! Runs the collectives of other libraries and ours in turn on this machine, and writes tables, raw values and plots.
//!
//! Only ratios within one comparison are meaningful, because machines change from minute to minute. So every program
//! runs once in each round, the order rotates from round to round, and medians are taken over the rounds in which the
//! cores were equally far from each other.

pub(crate) mod args;
mod facts;
mod plot;
mod probe;
mod program;
mod raw;
mod results;
mod rows;
mod stream;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use program_kit::process::{self, Outcome};
use program_kit::{Usage, memory};

use args::{Args, Part, Transport};
use program::{Program, Role};
use results::{Column, Measured, Run, Summary};
use rows::Output;

/// Exit code of our benchmark when the library lacks a requested feature.
const CANNOT_RUN: i32 = 3;
/// Rounds that run regardless of the time.
const FEWEST_ROUNDS: u32 = 3;
/// The peers' last remark.
const COMPLETE: &str = "complete";
/// A program that had to be ended this often is left out from then on.
const PATIENCE: u32 = 2;

/// The page through which two ranks probe how far apart their cores are.
const PROBE: &str = "probe";

pub(crate) fn run(args: &Args) -> Result<i32> {
    if let Some(values) = &args.plot {
        return redraw(values, &args.output);
    }
    let ops = args.operations().map_err(Usage)?;
    if !args.stress.is_file() {
        bail!("{} is not there; scripts/compare-peers builds it, and the peers' benchmarks", args.stress.display());
    }
    // The programs run one after the other; each rank has an input and an output.
    let ranks = args.parts().iter().map(|part| part.ranks).max().unwrap_or(0);
    let buffers = (2 * args.max as u64).saturating_mul(u64::from(ranks));
    memory::suffices(format_args!("{ranks} ranks"), buffers, "a smaller -e")?;
    fs::write(args.programs.join(PROBE), [0; 4096]).context("writing the file that ranks probe through")?;
    let start = Instant::now();
    let facts = facts::facts(&args.programs);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut parts: Vec<Bench> = args.parts().into_iter().map(|part| Bench::new(args, part, &ops, cores)).collect();
    let (mut streams, mut notes) = (Vec::new(), Vec::new());
    let tcp = args.parts().iter().any(|part| part.transport == Transport::Tcp);
    let mut stream = tcp && !args.no_stream && ops.iter().any(|&op| op == "sendrecv" || op == "pingpong");
    for round in 0..args.rounds {
        let each = start.elapsed().as_secs_f64() / 60.0 / f64::from(round.max(1));
        if round >= FEWEST_ROUNDS && each * f64::from(round + 1) > args.minutes {
            let (rounds, minutes) = (args.rounds, args.minutes);
            notes.push(format!("{round} of {rounds} rounds: more would have taken over {minutes} minutes"));
            break;
        }
        for part in &mut parts {
            part.round(args, round);
        }
        if stream {
            eprintln!("round {}/{}: one TCP stream", round + 1, args.rounds);
            match stream::round(args) {
                Ok(rates) => streams.push(rates),
                Err(error) => {
                    notes.push(format!("TCP stream: {error:#}"));
                    stream = false;
                }
            }
        }
        // An interrupted comparison keeps its results so far.
        write(args, &facts, &parts, &streams, &notes)?;
    }
    write(args, &facts, &parts, &streams, &notes)?;
    let took = start.elapsed().as_secs();
    eprintln!("wrote {}.md, .csv and .svg after {} min {} s", args.output.display(), took / 60, took % 60);
    Ok(0)
}

/// A program of a part.
struct Entry {
    program: Program,
    /// Runs that hit the time limit or failed.
    ended: u32,
    out: bool,
    version: Option<String>,
}

/// The programs of a part and their results so far.
struct Bench {
    entries: Vec<Entry>,
    measured: Measured,
}

impl Bench {
    fn new(args: &Args, part: Part, ops: &[&str], cores: usize) -> Bench {
        let programs = program::programs(args, &part, ops, cores, Path::exists);
        let columns = programs.iter().map(|p| Column { name: p.name.to_owned(), role: p.role }).collect();
        let entry = |program| Entry { program, ended: 0, out: false, version: None };
        Bench {
            entries: programs.into_iter().map(entry).collect(),
            measured: Measured { part, columns, runs: Vec::new(), notes: Vec::new() },
        }
    }

    /// Every program once; each round begins with another one.
    fn round(&mut self, args: &Args, round: u32) {
        let count = self.entries.len();
        for turn in 0..count {
            let column = (turn + round as usize) % count;
            if !self.entries[column].out {
                for note in self.turn(args, round, column) {
                    // Kept once.
                    if !self.measured.notes.contains(&note) {
                        self.measured.notes.push(note);
                    }
                }
            }
        }
    }

    /// Runs a program; what is to be noted about it.
    fn turn(&mut self, args: &Args, round: u32, column: usize) -> Vec<String> {
        let Entry { program, ended, out, version } = &mut self.entries[column];
        let name = program.name;
        let before = probe::round_trip();
        // Two ranks, a core each.
        let probe = (self.measured.part.ranks == 2 && before.is_some()).then(|| args.programs.join(PROBE));
        let outcome = process::run_group(&mut program.command(probe.as_deref()), args.limit);
        let after = probe::round_trip();
        let place = format!("round {}/{}, {}: {name}", round + 1, args.rounds, self.measured.part.key());
        let (outcome, output) = match understood(program, outcome) {
            Ok(both) => both,
            Err(why) => {
                eprintln!("{place}: left out: {why:#}");
                *out = true;
                return vec![format!("{name}: {why:#}")];
            }
        };
        let nanoseconds = |ns: Option<f64>| ns.map_or("?".to_owned(), |ns| format!("{ns:.0}"));
        eprintln!(
            "{place}: {} rows in {:.1} s, cores {} to {} ns apart",
            output.rows.len(),
            outcome.took.as_secs_f64(),
            nanoseconds(before),
            nanoseconds(after)
        );
        let mut notes = Vec::new();
        let remarks = &output.remarks;
        if program.role == Role::Peer {
            *version = version.take().or_else(|| remarks.first().cloned());
            notes.extend(remarks.iter().filter(|r| r.contains("left out")).map(|remark| format!("{name}: {remark}")));
        }
        if let Some(line) = output.broken.filter(|_| outcome.code == Some(0)) {
            notes.push(format!("{name}: unexpected line: {line}"));
        }
        // A failure after the last line does not matter.
        let complete = remarks.iter().any(|remark| remark == COMPLETE);
        if !complete && (outcome.late || outcome.code != Some(0)) {
            *ended += 1;
            *out = *ended >= PATIENCE;
            notes.push(if outcome.late {
                let limit = args.limit.as_secs_f64();
                format!("{name}: ended after {limit:.0} s in round {}; what it had printed counts", round + 1)
            } else {
                // It died, or its own limit ended it.
                let last = output.rows.last().map(|row| format!(" after {} {} bytes", row.op, row.bytes));
                format!("{name}: ended by itself{}: {}", last.unwrap_or_default(), last_words(&outcome))
            });
        }
        self.measured.runs.push(Run { column, round, before, after, rows: output.rows });
        notes
    }
}

/// Output of a program, or the reason why it is left out.
fn understood(program: &Program, outcome: Result<Outcome>) -> Result<(Outcome, Output)> {
    let read = || {
        let outcome = outcome?;
        let output = rows::parse(&outcome.stdout)?;
        let lacks = program.role != Role::Peer && outcome.code == Some(CANNOT_RUN);
        if output.rows.is_empty() && !lacks {
            bail!("no result: {}", last_words(&outcome));
        }
        Ok((outcome, output, lacks))
    };
    match read() {
        Ok((.., true)) => bail!("the library does not offer it yet"),
        Ok((outcome, output, false)) => Ok((outcome, output)),
        Err(why) => bail!("{why:#} (`{}`)", program.line()),
    }
}

/// The last line that says something, for a note.
fn last_words(outcome: &Outcome) -> String {
    let line = |text: &str| {
        let said = |l: &&str| l.chars().any(char::is_alphabetic);
        text.lines().rev().map(str::trim).find(said).map(str::to_owned)
    };
    line(&outcome.stderr).or_else(|| line(&outcome.stdout)).unwrap_or_else(|| "it said nothing".to_owned())
}

/// Writes the page, the raw values and the plots.
fn write(
    args: &Args,
    facts: &[(String, String)],
    parts: &[Bench],
    streams: &[stream::Rates],
    notes: &[String],
) -> Result<PathBuf> {
    let mut page = table::head(args, facts, parts.iter().flat_map(|part| &part.entries));
    for part in parts {
        let summary = results::summary(&part.measured);
        page += &table::part(&summary);
        draw(&args.output, &summary)?;
    }
    let name = args.output.file_name().unwrap_or_default().display();
    page += &format!("Plots: `scripts/compare-peers plot {name}.csv PREFIX`.\n\n");
    page += &table::streams(streams, notes);
    save(&args.output, ".md", &page)?;
    save(&args.output, ".csv", &raw::write(parts.iter().map(|part| &part.measured)))
}

/// Draws every part of a file of raw values.
fn redraw(values: &Path, output: &Path) -> Result<i32> {
    let text = fs::read_to_string(values).with_context(|| format!("cannot read {}", values.display()))?;
    let parts = raw::read(&text).with_context(|| format!("{} holds no raw values", values.display()))?;
    for measured in &parts {
        if let Some(path) = draw(output, &results::summary(measured))? {
            eprintln!("wrote {}", path.display());
        }
    }
    Ok(0)
}

/// The plot of a part: PREFIX-PART.svg; `None` when there is nothing to draw.
fn draw(output: &Path, summary: &Summary) -> Result<Option<PathBuf>> {
    plot::svg(summary)?.map(|svg| save(output, &format!("-{}.svg", summary.part.key()), &svg)).transpose()
}

/// Writes the file whose name is `output` and `ending`, and makes its folder.
fn save(output: &Path, ending: &str, text: &str) -> Result<PathBuf> {
    let mut path = output.to_owned().into_os_string();
    path.push(ending);
    let path = PathBuf::from(path);
    program_kit::output::Output::create(&path)?.finish(text.as_bytes())?;
    Ok(path)
}
