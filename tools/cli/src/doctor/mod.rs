//! `doctor`: the capabilities of this machine, the missing parts per milestone, and the command that provides each.

mod gpu;
mod host;
mod milestones;
pub(crate) mod nccl;
mod nccl_symbols;
pub(crate) mod network;
mod rdma;
mod report;
mod software;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

/// Lists this machine's resources for ranks, and the milestones that run on it. Missing parts are no error: the exit
/// status is 0.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print each place that was searched, and each reason in full.
    #[arg(short, long)]
    verbose: bool,
    /// Open this libnccl in this process and describe it as JSON, as `doctor` does for each library that it finds.
    #[arg(long, hide = true, value_name = "FILE")]
    open: Option<PathBuf>,
}

/// The roots of /proc, /sys and others; tests have their own folders.
#[derive(Debug, Clone)]
pub(crate) struct Roots {
    pub(crate) proc: PathBuf,
    pub(crate) sys: PathBuf,
    pub(crate) dev: PathBuf,
}

impl Roots {
    fn of_this_machine() -> Roots {
        Roots { proc: "/proc".into(), sys: "/sys".into(), dev: "/dev".into() }
    }
}

/// All facts about the machine.
#[derive(Debug, Serialize)]
pub(crate) struct Facts {
    host: host::Host,
    interfaces: Vec<network::Interface>,
    rdma: rdma::Rdma,
    cuda: gpu::Cuda,
    nccl_libraries: Vec<nccl::Place>,
    software: software::Software,
}

#[derive(Debug, Serialize)]
struct Page<'a> {
    #[serde(flatten)]
    facts: &'a Facts,
    milestones: &'a [milestones::Milestone],
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(library) = &options.open {
        // A separate line, whatever the library prints.
        let described = serde_json::to_string(&nccl::open(library)?).context("writing JSON")?;
        return crate::print(&format!("\n{described}\n"));
    }
    let roots = Roots::of_this_machine();
    let facts = Facts {
        host: host::Host::read(&roots),
        interfaces: network::read(&roots.sys)?,
        rdma: rdma::Rdma::read(&roots),
        cuda: gpu::Cuda::ask(),
        nccl_libraries: nccl::all(),
        software: software::Software::find(),
    };
    let milestones = milestones::all(&facts);
    let text = if options.json {
        let page = Page { facts: &facts, milestones: &milestones };
        serde_json::to_string_pretty(&page).context("writing JSON")? + "\n"
    } else {
        report::text(&facts, &milestones, options.verbose)
    };
    crate::print(&text)
}

/// The text of a file of the kernel's, without its last line end; `None` where there is none.
fn text(path: PathBuf) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
