//! Milestone 12: starts PyTorch ranks that train a model with DistributedDataParallel over the backend "tinynccl".

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use course_kit::python::{Needs, Ranks, Unavailable};

/// DistributedDataParallel over tinynccl; compares the weights with those over gloo (or nccl).
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    /// Options of train.py: --model mlp|gpt, --device cpu|cuda, --epochs, --steps, --against BACKEND|none, and others;
    /// -- --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    program_kit::exit_code(start(Args::parse()), |error| error.is::<Unavailable>())
}

// EXERCISE 1 (How it works): find an interpreter with torch, build the extension unless a folder is given, and let
// `Launcher` run train.py once per rank, with PYTHONPATH, and INIT_METHOD naming a file for torch's store.
fn start(args: Args) -> Result<i32> {
    // The file of torch's store, which needs no free port.
    let store = std::env::temp_dir().join(format!("tinynccl-ddp-{}", std::process::id()));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/train.py");
    let outcome = args.ranks.run(Needs::Torch, Path::new(script), args.args, |launcher| {
        launcher
            .env("OMP_NUM_THREADS", std::env::var_os("OMP_NUM_THREADS").unwrap_or_else(|| "1".into()))
            .env("INIT_METHOD", format!("file://{}", store.display()))
            .plain_rank0(true)
    });
    let _ = std::fs::remove_file(&store);
    outcome
}
