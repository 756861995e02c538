//! Runs the collectives of other libraries and ours in turn on this machine, and writes tables, raw values and plots.
//!
//! Only ratios within one comparison are meaningful, because machines change from minute to minute. So every program
//! runs once in each round, the order rotates from round to round, and medians are taken over the rounds in which the
//! cores were equally far from each other.

mod args;
mod facts;
mod plot;
mod probe;
mod program;
mod raw;
mod results;
mod rows;
mod stream;
mod table;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};

use args::{Args, Command, Part, Transport};
use program::{Program, Role};
use program_kit::memory;
use program_kit::process::{self, Outcome};
use program_kit::stats::median;
use results::{Column, Measured, Run, Summary};

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

fn main() -> Result<()> {
    let args = Args::parse().settled();
    if let Some(Command::Plot { values, output }) = &args.command {
        return redraw(values, output);
    }
    let ops = args.operations().unwrap_or_else(|e| Args::command().error(ErrorKind::ValueValidation, e).exit());
    if !args.stress.is_file() {
        bail!("{} is not there; scripts/compare-peers builds it, and the peers' benchmarks", args.stress.display());
    }
    // The programs run one after the other; each rank has an input and an output.
    let ranks = args.parts().iter().map(|part| part.ranks).max().unwrap_or(0);
    let buffers = (2 * args.max as u64).saturating_mul(u64::from(ranks));
    memory::suffices(format_args!("{ranks} ranks"), buffers, "a smaller -e")?;
    std::fs::write(args.programs.join(PROBE), [0; 4096]).context("writing the file that ranks probe through")?;
    let start = Instant::now();
    let facts = facts::facts(&args.programs);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut parts: Vec<Bench> = args.parts().into_iter().map(|part| Bench::new(&args, part, &ops, cores)).collect();
    let mut streams = Vec::new();
    let mut notes = Vec::new();
    let tcp = args.parts().iter().any(|part| part.transport == Transport::Tcp);
    let mut stream =
        tcp && !args.no_stream && args.ops.iter().any(|op| op == "all" || op == "sendrecv" || op == "pingpong");
    for round in 0..args.rounds {
        let each = start.elapsed().as_secs_f64() / 60.0 / f64::from(round.max(1));
        if round >= FEWEST_ROUNDS && each * f64::from(round + 1) > args.minutes {
            notes.push(format!(
                "{round} of {} rounds: more would have taken over {} minutes",
                args.rounds, args.minutes
            ));
            break;
        }
        for part in &mut parts {
            part.round(&args, round)?;
        }
        if stream {
            eprintln!("round {}/{}: one TCP stream", round + 1, args.rounds);
            match stream::round(&args) {
                Ok(rates) => streams.push(rates),
                Err(error) => {
                    notes.push(format!("TCP stream: {error:#}"));
                    stream = false;
                }
            }
        }
        // An interrupted comparison keeps its results so far.
        write(&args, &facts, &parts, &streams, &notes)?;
    }
    write(&args, &facts, &parts, &streams, &notes)?;
    let took = start.elapsed().as_secs();
    eprintln!("wrote {}.md, .csv and .svg after {} min {} s", args.output.display(), took / 60, took % 60);
    Ok(())
}

/// The programs of a part and their results so far.
struct Bench {
    programs: Vec<Program>,
    /// Runs of each program that hit the time limit or failed.
    ended: Vec<u32>,
    out: Vec<bool>,
    versions: Vec<Option<String>>,
    measured: Measured,
}

impl Bench {
    fn new(args: &Args, part: Part, ops: &[&str], cores: usize) -> Bench {
        let programs = program::programs(args, &part, ops, cores, Path::exists);
        let columns = programs.iter().map(|p| Column { name: p.name.to_owned(), role: p.role }).collect();
        let none = programs.len();
        Bench {
            programs,
            ended: vec![0; none],
            out: vec![false; none],
            versions: vec![None; none],
            measured: Measured { part, columns, runs: Vec::new(), notes: Vec::new() },
        }
    }

    /// Every program once; each round begins with another one.
    fn round(&mut self, args: &Args, round: u32) -> Result<()> {
        let count = self.programs.len();
        for turn in 0..count {
            let column = (turn + round as usize) % count;
            if !self.out[column] {
                self.turn(args, round, column)?;
            }
        }
        Ok(())
    }

    fn turn(&mut self, args: &Args, round: u32, column: usize) -> Result<()> {
        let program = &self.programs[column];
        let before = probe::round_trip();
        // Two ranks, a core each.
        let probe = (self.measured.part.ranks == 2 && before.is_some()).then(|| args.programs.join(PROBE));
        let outcome = process::run_group(&mut program.command(probe.as_deref()), args.limit);
        let after = probe::round_trip();
        let place = format!("round {}/{}, {}: {}", round + 1, args.rounds, self.measured.part.key(), program.name);
        let failed = |why: String| format!("{}: {why} (`{}`)", program.name, program.line());
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => return self.leave_out(column, &place, failed(format!("{error:#}"))),
        };
        let output = match rows::parse(&outcome.stdout) {
            Ok(output) => output,
            Err(error) => return self.leave_out(column, &place, failed(format!("{error:#}"))),
        };
        if program.role != Role::Peer && outcome.code == Some(CANNOT_RUN) {
            let note = format!("{}: the library does not offer it yet", program.name);
            return self.leave_out(column, &place, note);
        }
        if output.rows.is_empty() {
            return self.leave_out(column, &place, failed(format!("no result: {}", last_words(&outcome))));
        }
        let nanoseconds = |ns: Option<f64>| ns.map_or("?".to_owned(), |ns| format!("{ns:.0}"));
        eprintln!(
            "{place}: {} rows in {:.1} s, cores {} to {} ns apart",
            output.rows.len(),
            outcome.took.as_secs_f64(),
            nanoseconds(before),
            nanoseconds(after)
        );
        let mut remarks = output.remarks.iter();
        if program.role == Role::Peer && self.versions[column].is_none() {
            self.versions[column] = remarks.next().cloned();
        }
        if program.role == Role::Peer {
            for remark in output.remarks.iter().filter(|remark| remark.contains("left out")) {
                self.note(format!("{}: {remark}", self.programs[column].name));
            }
        }
        let program = &self.programs[column];
        // A failure after the last line does not matter.
        let complete = output.remarks.iter().any(|remark| remark == COMPLETE);
        if let Some(line) = output.broken.filter(|_| outcome.code == Some(0)) {
            self.note(format!("{}: unexpected line: {line}", program.name));
        }
        let program = &self.programs[column];
        if complete || program.role != Role::Peer && outcome.code == Some(0) {
            // Nothing is missing.
        } else if outcome.late {
            self.ended[column] += 1;
            let limit = args.limit.as_secs_f64();
            self.note(format!(
                "{}: ended after {limit:.0} s in round {}; what it had printed counts",
                program.name,
                round + 1
            ));
            self.out[column] = self.ended[column] >= PATIENCE;
        } else if outcome.code != Some(0) {
            // It died, or its own limit ended it.
            self.ended[column] += 1;
            let last = output.rows.last().map_or(String::new(), |row| format!(" after {} {} bytes", row.op, row.bytes));
            self.note(format!("{}: ended by itself{last}: {}", program.name, last_words(&outcome)));
            self.out[column] = self.ended[column] >= PATIENCE;
        }
        self.measured.runs.push(Run { column, round, before, after, rows: output.rows });
        Ok(())
    }

    fn leave_out(&mut self, column: usize, place: &str, why: String) -> Result<()> {
        eprintln!("{place}: left out: {why}");
        self.note(why);
        self.out[column] = true;
        Ok(())
    }

    /// Kept once.
    fn note(&mut self, note: String) {
        if !self.measured.notes.contains(&note) {
            self.measured.notes.push(note);
        }
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
    let mut page = head(args, facts, parts);
    for part in parts {
        let summary = results::summary(&part.measured);
        page += &table::part(&summary);
        draw(&args.output, &summary)?;
    }
    let name = args.output.file_name().unwrap_or_default().display();
    let _ = writeln!(page, "Plots: `scripts/compare-peers plot {name}.csv PREFIX`.\n");
    page += &stream_table(streams, notes);
    save(&args.output, ".md", &page)?;
    save(&args.output, ".csv", &raw::write(parts.iter().map(|part| &part.measured)))
}

/// Draws every part of a file of raw values.
fn redraw(values: &Path, output: &Path) -> Result<()> {
    let text = fs::read_to_string(values).with_context(|| format!("cannot read {}", values.display()))?;
    let parts = raw::read(&text).with_context(|| format!("{} holds no raw values", values.display()))?;
    for measured in &parts {
        if let Some(path) = draw(output, &results::summary(measured))? {
            eprintln!("wrote {}", path.display());
        }
    }
    Ok(())
}

/// The plot of a part: PREFIX-PART.svg; `None` when there is nothing to draw.
fn draw(output: &Path, summary: &Summary) -> Result<Option<PathBuf>> {
    plot::svg(summary)?.map(|svg| save(output, &format!("-{}.svg", summary.part.key()), &svg)).transpose()
}

/// Writes the file whose name is `output` and `ending`, and makes its folder.
fn save(output: &Path, ending: &str, text: &str) -> Result<PathBuf> {
    if let Some(folder) = output.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut path = output.to_owned().into_os_string();
    path.push(ending);
    let path = PathBuf::from(path);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn head(args: &Args, facts: &[(String, String)], parts: &[Bench]) -> String {
    let mut text = String::from("# Collectives beside other libraries\n\n| | |\n|---|---|\n");
    for (name, value) in facts {
        let _ = writeln!(text, "| {name} | {} |", value.replace('|', "\\|"));
    }
    let mut versions: Vec<&String> = parts.iter().flat_map(|p| p.versions.iter().flatten()).collect();
    versions.sort();
    versions.dedup();
    for version in versions {
        let _ = writeln!(text, "| Peer says | {} |", version.replace('\t', " "));
    }
    let _ = write!(
        text,
        "\nEvery program ran once in each round, {} rounds if no note below says less, in turn; rank r on core r modulo the number of cores. A time is the median over the \
         rounds; in each round it is the median over repetitions of calls back to back, each after a barrier, of the slowest \
         rank's mean. Sizes as nccl-tests: all_gather, reduce_scatter and all_to_all in total bytes. Ratios are the best \
         peer's time over ours: above 1 we are faster. `~`: most repetitions were disturbed by other programs. pingpong is there and \
         back. MPI has no bf16 and this Gloo reduces none, so bf16 is ours alone and counts in no ratio.\n\n",
        args.rounds
    );
    text += "What ran, with the first part's command of each:\n\n";
    let mut said: Vec<(&str, &str)> = Vec::new();
    for program in parts.iter().flat_map(|p| &p.programs) {
        if !said.contains(&(program.name, program.what)) {
            said.push((program.name, program.what));
            let _ = writeln!(text, "- {}: {}. `{}`", program.name, program.what, program.line());
        }
    }
    text + "\n"
}

fn stream_table(streams: &[stream::Rates], notes: &[String]) -> String {
    let mut text = String::new();
    if let Some(ours) = median(&streams.iter().map(|s| s.ours).collect::<Vec<_>>()) {
        text += "## One TCP stream on loopback, 128 MiB, GB/s\n\n| program | GB/s | ours / theirs |\n|---|---|---|\n";
        let _ = writeln!(text, "| tinynccl send and recv | {ours:.2} | |");
        for (i, write) in stream::WRITES.iter().enumerate() {
            let rates: Vec<f64> = streams.iter().filter_map(|s| s.theirs.get(i).copied()).collect();
            if let Some(theirs) = median(&rates) {
                let _ = writeln!(text, "| iperf3 -l {write} | {theirs:.2} | {:.2} |", ours / theirs);
            }
        }
        text.push('\n');
    }
    for note in notes {
        let _ = writeln!(text, "- {note}");
    }
    text
}
