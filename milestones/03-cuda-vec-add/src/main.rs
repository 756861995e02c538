//! Milestone 03: a CUDA kernel from Rust. See README.md beside Cargo.toml.

mod add;
mod cli;
mod compile;
mod device;
mod fault;
mod measure;
mod transfer;
mod unavailable;
mod values;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Mode};

fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    unavailable::exit_code(match cli.mode {
        None => add::run(&cli.options),
        Some(Mode::Faults) => fault::all(&cli.options),
        Some(Mode::Fault { kind }) => fault::one(kind, &cli.options),
    })
}
