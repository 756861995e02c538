//! `schedule`: a collective's schedule as text, picture or page.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use program_kit::{Usage, size};
use tinynccl_plan::algorithm::{self, Hosts, Shape};
use tinynccl_plan::schedule::draw::draw_all;
use tinynccl_plan::schedule::rounds::play;
use tinynccl_plan::schedule::{Program, Schedule};
use tinynccl_plan::wire::{Algorithm, Collective};

use crate::played::Played;
use crate::program::{self, By};
use crate::values::{collective, ranks};
use crate::{html, no_schedule, svg};

/// Ranks that a picture still shows.
const MOST_RANKS: usize = 32;
/// Steps that are held at once, half a gigabyte of them: a ring of 1448 ranks.
const MOST_STEPS: usize = 4 << 20;
/// Memory of a step, as a value and as a line of text: 110 bytes were measured for rings of 500 and 4000 ranks.
const STEP_BYTES: usize = 110;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Collective: all-reduce, reduce-scatter, all-gather, broadcast, reduce, gather, scatter, all-to-all, barrier.
    #[arg(value_parser = collective, required_unless_present = "program")]
    collective: Option<Collective>,
    /// Algorithm: ring, tree, double-tree, direct, halving-doubling, recursive-doubling, all-pairs, hierarchical.
    #[arg(required_unless_present = "program")]
    algorithm: Option<Algorithm>,
    /// File of a schedule, in place of collective and algorithm: as `--format program` writes it, MSCCL's XML, or an
    /// execution plan of mscclpp. It is proved first.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["collective", "algorithm", "ranks", "root", "channels"])]
    program: Option<PathBuf>,
    /// Number of ranks.
    #[arg(short = 'n', long, default_value_t = 4, value_parser = ranks())]
    ranks: usize,
    /// Root, for collectives that have one.
    #[arg(long, default_value_t = 0)]
    root: usize,
    /// Hosts of the ranks, for hierarchical: as many ranks on each, one after the other; the last may have fewer.
    #[arg(long, default_value_t = 1)]
    hosts: usize,
    /// Channels that the algorithm may spread over.
    #[arg(long, default_value_t = 1)]
    channels: usize,
    /// Bytes of a segment, for the bytes per link that a page counts; K, M and G are powers of 1024.
    #[arg(short, long, default_value = "1M", value_parser = size::parse)]
    size: usize,
    /// Output: the steps as text, one picture of all rounds, a page to step through them, or a file for --program
    /// (tinynccl's format, MSCCL's XML, or an execution plan of mscclpp).
    #[arg(short, long, default_value = "text")]
    format: Format,
    /// Writes MSCCL's or mscclpp's file for calls in place; these formats need one file for each form.
    #[arg(long)]
    in_place: bool,
    /// File to write to, instead of the standard output.
    #[arg(short, long)]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Svg,
    Html,
    Program,
    Msccl,
    Mscclpp,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let (by, shape, programs) = asked(options)?;
    let text = match options.format {
        Format::Text => draw_all(&programs),
        Format::Program | Format::Msccl | Format::Mscclpp => written(options, shape, programs)?,
        Format::Svg | Format::Html if shape.ranks > MOST_RANKS => {
            bail!(Usage(format!("a picture shows up to {MOST_RANKS} ranks, not {}: take --format text", shape.ranks)))
        }
        format => {
            let rounds = play(&programs, &shape).context("the schedule is wrong")?;
            let played = Played { by, shape, parts: programs[0].parts, size: options.size, rounds };
            match format {
                Format::Svg => svg::page(&played),
                _ => html::page(&played),
            }
        }
    };
    match &options.output {
        Some(path) => std::fs::write(path, text).with_context(|| format!("writing {}", path.display())),
        None => crate::print(&text),
    }
}

/// The schedule as a file for --program.
fn written(options: &Options, shape: Shape, programs: Vec<Program>) -> Result<String> {
    let schedule = Schedule::new(shape, programs).context("the schedule is wrong")?;
    Ok(match options.format {
        Format::Msccl => schedule.to_msccl(options.in_place)?,
        Format::Mscclpp => schedule.to_mscclpp(options.in_place)?,
        _ => schedule.to_string(),
    })
}

/// The programs of all ranks.
fn asked(options: &Options) -> Result<(By, Shape, Vec<Program>)> {
    if let Some(path) = &options.program {
        let schedule = program::read(path)?;
        let (shape, programs) = (*schedule.shape(), schedule.programs().to_vec());
        return Ok((By::Own(schedule), shape, programs));
    }
    let (Some(collective), Some(algorithm)) = (options.collective, options.algorithm) else {
        bail!(Usage("expected a collective and an algorithm, or --program FILE".to_owned()));
    };
    let root = if collective.has_root() { options.root } else { 0 };
    let shape = Shape { collective, ranks: options.ranks, root, channels: options.channels };
    let each = shape.ranks.div_ceil(options.hosts.max(1)).max(1);
    let hosts = Hosts::of(&(0..shape.ranks).map(|rank| rank / each).collect::<Vec<_>>());
    let programs = programs(algorithm, &shape, &hosts)?;
    Ok((By::Library(algorithm), shape, programs))
}

fn programs(algorithm: Algorithm, shape: &Shape, hosts: &Hosts) -> Result<Vec<Program>> {
    if shape.root >= shape.ranks {
        bail!(Usage(format!("root is {}, expected a rank below {}", shape.root, shape.ranks)));
    }
    let mut programs = Vec::new();
    let mut steps = 0;
    for rank in 0..shape.ranks {
        let program = algorithm::program_on(algorithm, shape, hosts, rank);
        let program = program.ok_or_else(|| Usage(no_schedule(algorithm, shape)))?;
        steps += program.lanes.iter().map(|lane| lane.steps.len()).sum::<usize>();
        programs.push(program);
        if steps > MOST_STEPS {
            bail!(Usage(too_long(algorithm, shape, steps / programs.len())));
        }
    }
    Ok(programs)
}

/// The error where the programs of all ranks would fill the memory, `each` steps long.
fn too_long(algorithm: Algorithm, shape: &Shape, each: usize) -> String {
    let &Shape { collective, ranks, .. } = shape;
    let gigabytes = each as f64 * ranks as f64 * STEP_BYTES as f64 / 1e9;
    let name = collective.name().replace('_', "-");
    format!(
        "{algorithm} on {ranks} ranks has about {each} steps on each of them, {gigabytes:.1} GB in all, and a schedule is \
         shown up to {:.1} GB: take fewer ranks; `tinynccl-cli simulate {name} --algo {algorithm} --ranks {ranks}` \
         estimates its time without listing the steps",
        (MOST_STEPS * STEP_BYTES) as f64 / 1e9
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn played(collective: Collective, algorithm: Algorithm, ranks: usize) -> Played {
        let shape = Shape { collective, ranks, root: 0, channels: 1 };
        let programs = programs(algorithm, &shape, &Hosts::default()).unwrap();
        let rounds = play(&programs, &shape).unwrap();
        Played { by: By::Library(algorithm), shape, parts: programs[0].parts, size: 1000, rounds }
    }

    #[test]
    fn what_has_no_schedule_names_what_has() {
        let shape = Shape { collective: Collective::AllToAll, ranks: 4, root: 0, channels: 1 };
        let error = programs(Algorithm::Ring, &shape, &Hosts::default()).unwrap_err().to_string();
        assert_eq!(error, "ring has no schedule for all_to_all on 4 ranks, these have: direct");
    }

    #[test]
    fn what_would_fill_the_memory_is_refused_with_its_size() {
        let of = |algorithm, ranks| {
            let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
            programs(algorithm, &shape, &Hosts::default()).map(|p| p.len()).map_err(|e| e.to_string())
        };
        let error = of(Algorithm::Ring, 100_000).unwrap_err();
        let start = "ring on 100000 ranks has about 199999 steps on each of them, 2200.0 GB in all, and a schedule is shown up \
                     to 0.5 GB: take fewer ranks; `tinynccl-cli simulate all-reduce --algo ring --ranks 100000` ";
        assert!(error.starts_with(start), "{error}");
        assert_eq!(of(Algorithm::Tree, 10_000), Ok(10_000), "short on every rank");
    }

    #[test]
    fn pictures_show_every_message() {
        for (collective, algorithm) in
            [(Collective::AllReduce, Algorithm::Ring), (Collective::AllToAll, Algorithm::Direct)]
        {
            let played = played(collective, algorithm, 4);
            let messages: usize = played.rounds.iter().map(|r| r.sent.len()).sum();
            assert_eq!(svg::page(&played).matches("class=\"arrow\"").count(), messages);
            let page = html::page(&played);
            assert_eq!(page.matches("class=\"arrow\"").count(), messages);
            assert_eq!(page.matches("<g class=\"travel\"").count(), messages);
            // The first round of both only sends, so it shows the start.
            assert_eq!(page.matches("<g class=\"frame\"").count(), played.rounds.len() - 1);
            assert!(!page.contains("http"), "the page needs nothing from elsewhere");
            let sent = played.rounds.iter().flat_map(|r| &r.sent).filter(|m| m.from == 1);
            let all = format!("<td data-link=\"1-all\">{}</td>", sent.map(|m| played.bytes(m)).sum::<u64>());
            assert!(page.contains(&all), "{all}");
        }
    }

    #[test]
    fn the_picture_of_the_readme_is_up_to_date() {
        let picture = svg::page(&played(Collective::AllReduce, Algorithm::Ring, 4));
        let command =
            "cargo run -p tinynccl-cli -- schedule all-reduce ring --format svg --output docs/pictures/ring.svg";
        assert!(picture == include_str!("../../../docs/pictures/ring.svg"), "make it again: {command}");
    }

    #[test]
    fn a_page_numbers_the_parts_and_says_what_arrives() {
        let page = html::page(&played(Collective::AllReduce, Algorithm::Ring, 4));
        for words in [">arriving: 3<", ">arriving: 0+3<", ">arriving: 0+1+3<", ">arriving: the sum<"] {
            assert!(page.contains(words), "{words}");
        }
        assert!(!page.contains(">arriving: 0+1+2+3<"));
        for part in 0..4 {
            assert!(page.contains(&format!("fill=\"#222\">{part}</text>")), "{part}");
        }
        let page = html::page(&played(Collective::AllGather, Algorithm::Ring, 4));
        assert!(page.contains(">arriving: 3<") && !page.contains(">arriving: the sum<") && page.contains(">3</text>"));
    }
}
