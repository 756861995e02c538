//! Milestone 11: starts Python ranks whose arrays and tensors go through tinynccl.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use course_kit::python::{Needs, Ranks, Unavailable};

/// Builds the extension, finds Python with numpy or torch, and starts ranks.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    /// Script that the ranks run (default: this milestone's own script).
    script: Option<PathBuf>,
    /// Arguments of the script.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    program_kit::exit_code(start(Args::parse()), |error| error.is::<Unavailable>())
}

// EXERCISE 1 (How it works): find an interpreter, build the extension unless a folder is given, and let `Launcher`
// run the script once per rank, with the extension's folder in PYTHONPATH.
fn start(args: Args) -> Result<i32> {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/python/ranks.py");
    let script = args.script.unwrap_or_else(|| PathBuf::from(own));
    args.ranks.run(Needs::Arrays, &script, args.args, |launcher| launcher)
}
