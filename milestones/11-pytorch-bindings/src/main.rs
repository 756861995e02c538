//! Milestone 11: starts Python ranks whose arrays and tensors go through tinynccl.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use pytorch_bindings::{Interpreter, Needs, exit_code, extension};
use tinynccl::launch::Launcher;

/// Builds the extension, finds Python with numpy or torch, and starts ranks.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Ranks to start on this machine.
    #[arg(long, default_value_t = 2, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    ranks: usize,
    /// The interpreter (default: the first of python3, /usr/bin/python3 and others that has what is needed).
    #[arg(long)]
    python: Option<PathBuf>,
    /// Folder of a built package `tinynccl` (default: build it).
    #[arg(long)]
    module: Option<PathBuf>,
    /// What the ranks run (default: this milestone's own script).
    script: Option<PathBuf>,
    /// Arguments of the script.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    exit_code(start(Args::parse()))
}

// EXERCISE 1 (How it works): find an interpreter, build the extension unless a folder is given, and let `Launcher`
// run the script once per rank, with the extension's folder in PYTHONPATH.
fn start(args: Args) -> Result<i32> {
    let python = Interpreter::find(args.python, Needs::Arrays)?;
    let module = args.module.map_or_else(extension::build, Ok)?;
    println!("{python}");
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/python/ranks.py");
    let script = args.script.unwrap_or_else(|| PathBuf::from(own));
    Launcher::new(args.ranks)
        .program(&python.program)
        .args([script.into_os_string()].into_iter().chain(args.args.into_iter().map(Into::into)))
        .env("PYTHONPATH", module)
        .env("PYTHONUNBUFFERED", "1")
        .run()
        .context("starting the ranks")
}
