//! `topology`: the graph of this machine, of a job, or of a file.

#[cfg(feature = "doctor")]
mod discovered;
mod picture;
mod text;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use program_kit::output::Output;
use tinynccl_plan::simulate::machine::Graph;
use tinynccl_plan::simulate::machine::description::Description;

/// Draws the graph that collectives run on: hosts with NUMA nodes, cores, GPUs and network ports, and their links.
/// Alone it shows this machine, with a rank on each core. Under a launcher (mpirun; by hand RANK, WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT) it shows the machines of the job, whose first rank prints.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A description to draw in place of the discovered graph: TOML, JSON, or NCCL's XML (NCCL_TOPO_DUMP_FILE).
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Puts a rank on each GPU, and none elsewhere.
    #[arg(long)]
    gpus: bool,
    /// Output: a drawing, or the description that --file, `simulate --topology` and TINYNCCL_TOPOLOGY read.
    #[arg(short, long, default_value = "text")]
    format: Format,
    /// Writes the graph as a picture, too.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
    Toml,
}

/// The exit status.
///
/// # Errors
/// The file is no description, or the ranks do not find each other.
pub(crate) fn run(options: &Options) -> Result<()> {
    let (mut description, remark) = match &options.file {
        Some(path) => (read(path)?, None),
        None => match discovered()? {
            Some(found) => found,
            // Another rank prints.
            None => return Ok(()),
        },
    };
    if options.gpus {
        on_gpus(&mut description)?;
    }
    let shown = || options.file.as_ref().map_or("the topology".to_owned(), |path| path.display().to_string());
    let graph = Graph::new(&description).with_context(shown)?;
    let picture = options.svg.as_deref().map(Output::create).transpose()?;
    let text = match options.format {
        Format::Text => text::drawing(&description, &graph, remark.as_deref()),
        Format::Json => serde_json::to_string_pretty(&description)? + "\n",
        Format::Toml => toml::to_string(&description)?,
    };
    crate::print(&text)?;
    match picture {
        Some(picture) => picture.finish(picture::page(&description).as_bytes()),
        None => Ok(()),
    }
}

/// The description in a file.
///
/// # Errors
/// It cannot be read, or is none; with its name and the line.
pub(crate) fn read(path: &Path) -> Result<Description> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    Description::parse(&text).with_context(|| path.display().to_string())
}

#[cfg(feature = "doctor")]
fn discovered() -> Result<Option<(Description, Option<String>)>> {
    discovered::discovered()
}

#[cfg(not(feature = "doctor"))]
fn discovered() -> Result<Option<(Description, Option<String>)>> {
    bail!("this program was built without the library: name a description with --file")
}

/// Moves the ranks to the GPUs.
fn on_gpus(description: &mut Description) -> Result<()> {
    if !description.node.iter().any(is_gpu) {
        bail!("--gpus: there is no GPU in {}", description.name);
    }
    for node in &mut description.node {
        node.ranks = usize::from(is_gpu(node));
        node.numbers.clear();
        node.inside = None;
    }
    Ok(())
}

fn is_gpu(node: &tinynccl_plan::simulate::machine::description::Node) -> bool {
    node.kind.as_deref() == Some("gpu")
}

/// A bandwidth in words.
fn gb_s(gb_s: f64) -> String {
    format!("{} GB/s", digits(gb_s))
}

/// Three digits, without zeros at the end.
fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        100.0.. => 0,
        10.0..100.0 => 1,
        1.0..10.0 => 2,
        0.1..1.0 => 3,
        _ => 4,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
