//! `simulate`: the time of a collective on a machine, and its bottleneck.

mod machine;
mod output;
mod plot;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use program_kit::{Usage, size};
use tinynccl_plan::algorithm::{Shape, hierarchical};
use tinynccl_plan::simulate::packing::pack;
use tinynccl_plan::simulate::{Cut, Limits, Report, Scenario, simulate, simulate_schedule};
use tinynccl_plan::wire::{Algorithm, Collective};

use crate::program::{self, By};
use crate::values::{collective, ranks};
use crate::{has_schedule, no_schedule};
use machine::Topology;

/// Bytes of an element.
const ELEMENT: usize = 4;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Collective: all-reduce, reduce-scatter, all-gather, broadcast, reduce, gather, scatter, all-to-all, barrier.
    #[arg(value_parser = collective, required_unless_present = "program")]
    collective: Option<Collective>,
    /// File of a schedule, in place of a collective and its ranks: as `schedule --format program` writes it, MSCCL's
    /// XML, or an execution plan of mscclpp.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["collective", "algo", "ranks", "root", "channels"])]
    program: Option<PathBuf>,
    /// Writes the packed schedule to this file, for --program and `tinynccl::schedule::Schedule`.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Algorithms, separated by commas; auto: the fastest of those that can be simulated; all: each of them; packed:
    /// trees that are packed for the links of the topology.
    #[arg(long, default_value = "auto", value_parser = algorithms)]
    algo: Algorithms,
    /// Numbers of ranks, separated by commas.
    #[arg(short = 'n', long, default_value = "8", value_delimiter = ',', value_parser = ranks())]
    ranks: Vec<usize>,
    /// Sizes in bytes, separated by commas; K, M and G are powers of 1024. As in `stress`, the larger of a rank's input
    /// and output.
    #[arg(short, long, default_value = "1M", value_delimiter = ',', value_parser = size::parse)]
    size: Vec<usize>,
    /// dgx, mesh (a torus), fat-tree, host (ranks of one machine over shared memory), host-tcp, switch (all pairs
    /// alike), or a file (TOML or JSON).
    #[arg(short, long, default_value = "dgx")]
    topology: String,
    /// Longest message in bytes [default: the topology's].
    #[arg(long, value_parser = size::parse)]
    message: Option<usize>,
    /// Root, for collectives that have one.
    #[arg(long, default_value_t = 0)]
    root: usize,
    /// Channels that the algorithm may spread over.
    #[arg(long, default_value_t = 1)]
    channels: usize,
    /// Protocol by which GPUs of a dgx hand over messages; auto: the faster one.
    #[arg(long, default_value = "auto")]
    protocol: Protocol,
    /// Oversubscription of a fat tree: bandwidth of its hosts over that above its leaves.
    #[arg(long, default_value_t = 1.0)]
    oversubscription: f64,
    /// Latency in microseconds of the topology `switch`.
    #[arg(long, default_value_t = 1.0)]
    latency_us: f64,
    /// Bandwidth in GB/s of the topology `switch`.
    #[arg(long, default_value_t = 10.0)]
    bandwidth_gb_s: f64,
    /// For the topology `host`: a cost model that TINYNCCL_TUNE_CACHE=FILE.json has kept [default: built-in figures].
    #[arg(long)]
    cost_model: Option<PathBuf>,
    /// For the topology `host`: cores that the ranks share.
    #[arg(long)]
    cores: Option<usize>,
    /// Output: a table, or a format for programs.
    #[arg(short, long, default_value = "text")]
    format: Format,
    /// Draws time over size, or over the number of ranks, into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Largest number of simulated messages, after which the rest is extrapolated.
    #[arg(long, default_value_t = Limits::default().messages)]
    events: u64,
    /// Links to list, the fullest first.
    #[arg(long, default_value_t = 8)]
    links: usize,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Protocol {
    Auto,
    Simple,
    Ll,
}

#[derive(Debug, Clone, PartialEq)]
enum Algorithms {
    /// The fastest.
    Auto,
    All,
    Packed,
    These(Vec<Algorithm>),
}

/// One simulation.
#[derive(Debug)]
struct Case {
    by: By,
    shape: Shape,
    /// Bytes asked for.
    size: usize,
    message: usize,
    machine: String,
    report: Report,
    /// Least seconds that the machine's links allow, and the links that forbid less.
    limit: Option<(f64, Vec<String>)>,
}

impl Case {
    /// Bytes per second as nccl-tests counts them: of the size, and of what each link would carry at best.
    fn bandwidths(&self) -> (f64, f64) {
        let algbw = self.size as f64 / self.report.time;
        (algbw, algbw * self.shape.collective.bus_factor(self.shape.ranks))
    }
}

fn algorithms(text: &str) -> Result<Algorithms, String> {
    match text {
        "auto" => Ok(Algorithms::Auto),
        "all" => Ok(Algorithms::All),
        "packed" => Ok(Algorithms::Packed),
        names => names.split(',').map(str::parse).collect::<Result<_, _>>().map(Algorithms::These),
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let topology = Topology::new(options)?;
    let mut cases = vec![];
    let mut left_out = vec![];
    match (&options.program, options.collective) {
        (Some(path), _) => {
            let schedule = program::read(path)?;
            for &size in &options.size {
                let by = By::Own(schedule.clone());
                cases.push(fastest_protocol(options, &topology, &by, *schedule.shape(), size)?);
            }
        }
        (None, None) => bail!(Usage("expected a collective, or --program FILE".to_owned())),
        (None, Some(collective)) => {
            for &ranks in &options.ranks {
                if options.root >= ranks {
                    bail!(Usage(format!(
                        "root is {}, expected a rank below the number of ranks, {ranks}",
                        options.root
                    )));
                }
                let root = if collective.has_root() { options.root } else { 0 };
                let shape = Shape { collective, ranks, root, channels: options.channels };
                for &size in &options.size {
                    cases.extend(simulated(options, &topology, shape, size, &mut left_out)?);
                }
            }
        }
    }
    let text = match options.format {
        Format::Text => output::text(&cases, &left_out, options.links),
        Format::Json => output::json(&cases, options.links),
    };
    if let Some(path) = &options.plot {
        let svg = plot::svg(&cases)?;
        std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))?;
    }
    crate::print(&text)
}

/// The simulations of one size and shape.
fn simulated(
    options: &Options,
    topology: &Topology,
    shape: Shape,
    size: usize,
    left_out: &mut Vec<String>,
) -> Result<Vec<Case>> {
    let ranks = shape.ranks;
    if options.algo == Algorithms::Packed {
        return Ok(vec![fastest_protocol(options, topology, &By::Packed, shape, size)?]);
    }
    let hosts = topology.machines(ranks, 0)?.first().map(|machine| machine.hosts(ranks)).unwrap_or_default();
    let has = |&algorithm: &Algorithm| match algorithm {
        Algorithm::Hierarchical => hierarchical::supports(&shape, &hosts),
        _ => has_schedule(algorithm, &shape),
    };
    let asked = match &options.algo {
        Algorithms::These(asked) => asked.clone(),
        _ => Algorithm::ALL.into_iter().filter(has).collect(),
    };
    if let Some(&algorithm) = asked.iter().find(|algorithm| !has(algorithm)) {
        bail!(Usage(no_schedule(algorithm, &shape)));
    }
    let chosen = matches!(options.algo, Algorithms::These(_));
    let mut cases = vec![];
    for algorithm in asked {
        match fastest_protocol(options, topology, &By::Library(algorithm), shape, size) {
            Ok(case) => cases.push(case),
            Err(error) if chosen => return Err(error),
            Err(error) => left_out.push(format!("{algorithm}, {ranks} ranks, {size} bytes: {error:#}")),
        }
    }
    if options.algo == Algorithms::Auto {
        let fastest = cases.into_iter().min_by(|a, b| a.report.time.total_cmp(&b.report.time));
        cases = fastest.into_iter().collect();
    }
    match (cases.is_empty(), left_out.last()) {
        (true, Some(error)) => bail!("no algorithm can be simulated; the last: {error}"),
        _ => Ok(cases),
    }
}

fn fastest_protocol(options: &Options, topology: &Topology, by: &By, shape: Shape, size: usize) -> Result<Case> {
    let segments = |rank| shape.input_segments(rank).max(shape.output_segments(rank));
    let count = size / ELEMENT / segments(shape.root).max(segments((shape.root + 1) % shape.ranks)).max(1);
    let footprint = count * ELEMENT * (shape.input_segments(shape.root) + shape.output_segments(shape.root));
    let message =
        options.message.unwrap_or_else(|| topology.message(by.algorithm(), &shape, count * ELEMENT)).max(ELEMENT);
    let limits = Limits { messages: options.events, ..Limits::default() };
    let mut best: Option<Case> = None;
    let cut = Cut { count, elem_size: ELEMENT, max_message: message };
    for machine in topology.machines(shape.ranks, footprint)? {
        let report = match by {
            By::Library(algorithm) => {
                let algorithm = *algorithm;
                let call = Scenario { algorithm, shape, count, elem_size: ELEMENT, max_message: message };
                simulate(&call, &*machine, &limits)?
            }
            By::Own(schedule) => simulate_schedule(schedule, cut, &*machine, &limits)?,
            By::Packed => {
                let schedule = pack(&*machine, &shape, cut)?;
                if let Some(path) = &options.save {
                    std::fs::write(path, schedule.to_string())
                        .with_context(|| format!("writing {}", path.display()))?;
                }
                simulate_schedule(&schedule, cut, &*machine, &limits)?
            }
        };
        if best.as_ref().is_none_or(|b| report.time < b.report.time) {
            let limit = machine.bound(&shape);
            let limit = limit.map(|bound| (bound.seconds_per_byte * (count * ELEMENT) as f64, bound.links));
            best = Some(Case { by: by.clone(), shape, size, message, machine: machine.name(), report, limit });
        }
    }
    best.context("the topology has no machine")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_are_a_list_or_a_word() {
        assert_eq!(algorithms("auto"), Ok(Algorithms::Auto));
        assert_eq!(algorithms("ring,tree"), Ok(Algorithms::These(vec![Algorithm::Ring, Algorithm::Tree])));
        assert!(algorithms("rings").unwrap_err().contains("unknown algorithm 'rings'"));
    }
}
