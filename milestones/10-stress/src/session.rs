//! One rank's run: every case, every size, both places.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Result, bail};
use program_kit::output::Output;
use tinynccl::Comm;
use tinynccl::wire::Collective;

use crate::args::{Args, Plan};
use crate::case::{Case, Place};
use crate::memory::Arena;
use crate::pattern::{Number, Pattern, Tables, with_type};
use crate::record::{Machine, Record, Row, now};
use crate::row;
use crate::table::{self, Totals};
use crate::{csv, pin, plot, probe};

/// Bytes of a rank's name in the list of ranks.
const NAME: usize = 96;

/// Runs everything on this rank. The rank that `speaks`, a rank 0, prints. All ranks return the same number of wrong
/// elements.
pub(crate) fn run(comm: &Comm, speaks: bool, args: &Args, plan: &Plan) -> Result<u64> {
    let cases = plan.cases(comm.size()).map_err(anyhow::Error::msg)?;
    let mut plan = plan.clone();
    plan.settings.effort.crowded = comm.size() > std::thread::available_parallelism().map_or(1, usize::from);
    let plan = &plan;
    let mut arena = Arena::new(comm, plan.largest(&cases, comm.size()), args.buffers, args.huge_pages)?;
    let core = if args.pin { pin::to_core(comm.local_rank()) } else { None };
    probe::open(comm)?;
    let mut report = Report::new(speaks, args, core.is_some())?;
    report.say(&introduction(args, plan, comm.size()))?;
    report.say(&who(comm, core)?)?;
    report.say(&if args.csv { csv::heading() } else { table::heading() })?;
    for case in &cases {
        report.say(&table::title(case))?;
        with_type!(case.dtype, T => block::<T>(comm, case, args, plan, &mut arena, &mut report)?);
    }
    comm.barrier()?;
    report.finish(comm)
}

/// The rows of one case.
fn block<T: Number>(
    comm: &Comm,
    case: &Case,
    args: &Args,
    plan: &Plan,
    arena: &mut Arena,
    report: &mut Report<'_>,
) -> Result<()> {
    let tables = Tables::<T>::new(&Pattern::new::<T>(case.op, comm.size(), args.seed));
    for bytes in plan.rows_of(case, comm.size()) {
        let layout = case.layout(bytes, comm.size());
        let mut row = Row::new(case, layout, algorithm(comm, case, layout.count));
        row.out_of_place = row::run(comm, case, Place::Out, layout, &tables, &plan.settings, arena)?;
        row.in_place = row::run(comm, case, Place::In, layout, &tables, &plan.settings, arena)?;
        for measured in [&row.out_of_place, &row.in_place].into_iter().flatten() {
            report.totals.add(measured);
        }
        if args.csv {
            report.lines(csv::rows(&row))?;
        } else {
            report.say(&table::row(case, layout, row.out_of_place.as_ref(), row.in_place.as_ref()))?;
            if let Some(line) = of_links(comm, case, &row, layout.count) {
                report.say(&line)?;
            }
        }
        report.rows.push(row);
    }
    Ok(())
}

/// The faster of both places beside what the links of a described machine allow.
fn of_links(comm: &Comm, case: &Case, row: &Row, count: usize) -> Option<String> {
    let limit = comm.explain(&case.call(count)).ok()?.limit?;
    let measured = [&row.out_of_place, &row.in_place].into_iter().flatten().map(|row| row.timing.median);
    let seconds = measured.reduce(f64::min)?;
    let of = limit.ns * 1e-9 / seconds;
    Some(format!("# {of:.2} of what the links allow ({})", limit.links.join(", ")))
}

/// The library's choice for segments of this many elements.
fn algorithm(comm: &Comm, case: &Case, count: usize) -> Option<&'static str> {
    if case.collective == Collective::SendRecv {
        return None;
    }
    comm.explain(&case.call(count)).ok().map(|choice| choice.algorithm.name())
}

fn introduction(args: &Args, plan: &Plan, ranks: usize) -> String {
    let effort = plan.settings.effort;
    let Machine { processor, kernel, .. } = Machine::here();
    let iterations = effort.iterations.map_or("as time allows".to_owned(), |n| n.to_string());
    format!(
        "# tinynccl {} ranks {ranks} minBytes {} maxBytes {} warmup iters: {} iters: {iterations} repetitions: {} \
         validation: {} blocking: {}\n# Processor of rank 0: {processor}; Linux {kernel}\n#\n# Ranks",
        env!("CARGO_PKG_VERSION"),
        args.min,
        args.max,
        effort.warm_up,
        effort.repetitions,
        u8::from(plan.settings.check),
        u8::from(!plan.settings.asynchronous),
    )
}

/// A line for each rank: process, host, core.
fn who(comm: &Comm, core: Option<usize>) -> Result<String> {
    let host = Machine::here().host;
    let place = core.map_or("not pinned".to_owned(), |core| format!("core {core}"));
    let own = format!("pid {:>7} on {host}, {place}", std::process::id());
    let mut name = [0u8; NAME];
    for (to, from) in name.iter_mut().zip(own.bytes()) {
        *to = from;
    }
    let mut names = vec![0u8; NAME * comm.size()];
    comm.all_gather(&name, &mut names)?;
    let lines: Vec<String> = names
        .chunks(NAME)
        .enumerate()
        .map(|(rank, name)| format!("#  Rank {rank:>2} {}", String::from_utf8_lossy(name).trim_end_matches('\0')))
        .collect();
    Ok(lines.join("\n") + "\n#")
}

/// Prints on rank 0.
pub(crate) fn say(comm: &Comm, text: &str) -> Result<()> {
    if comm.rank() == 0 { print(text) } else { Ok(()) }
}

/// Flushes every line, so that a run of minutes shows its progress, also through a pipe.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        bail!("cannot write to standard output: {error}");
    }
    Ok(())
}

/// The printed and written output of one rank; the others only count.
struct Report<'a> {
    args: &'a Args,
    speaks: bool,
    pinned: bool,
    json: Option<Output>,
    plot: Option<Output>,
    rows: Vec<Row>,
    totals: Totals,
}

impl<'a> Report<'a> {
    fn new(speaks: bool, args: &'a Args, pinned: bool) -> Result<Report<'a>> {
        let open = |path: &Option<PathBuf>| match path {
            Some(path) if speaks => Output::create(path).map(Some),
            _ => Ok(None),
        };
        let (json, plot) = (open(&args.json)?, open(&args.plot)?);
        Ok(Report { args, speaks, pinned, json, plot, rows: Vec::new(), totals: Totals::default() })
    }

    fn say(&self, text: &str) -> Result<()> {
        if self.speaks { print(text) } else { Ok(()) }
    }

    fn lines(&self, lines: impl Iterator<Item = String>) -> Result<()> {
        for line in lines {
            self.say(&line)?;
        }
        Ok(())
    }

    fn finish(self, comm: &Comm) -> Result<u64> {
        self.say(&self.totals.summary())?;
        let Report { args, rows, totals, .. } = self;
        let census: Vec<(String, usize)> =
            comm.census().links.into_iter().map(|(kind, count)| (kind.to_owned(), count)).collect();
        if let Some(output) = self.plot {
            let title = format!("tinynccl, {} ranks, {}", comm.size(), Machine::here().processor);
            output.finish(plot::svg(&rows, &title)?.as_bytes())?;
        }
        if let Some(output) = self.json {
            let record = Record {
                format: 1,
                date: now(),
                version: env!("CARGO_PKG_VERSION"),
                command: std::env::args().collect(),
                machine: Machine::here(),
                ranks: comm.size(),
                links: census,
                pinned: self.pinned,
                rows,
                wrong: totals.checked.then_some(totals.wrong),
                average_busbw: totals.average(),
            };
            output.finish(&serde_json::to_vec_pretty(&record)?)?;
        }
        for path in [&args.json, &args.plot].into_iter().flatten().filter(|_| self.speaks) {
            println!("# wrote {}", path.display());
        }
        Ok(totals.wrong)
    }
}
