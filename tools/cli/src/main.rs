//! Looks at the library from outside: draws the schedule of any collective.

mod html;
mod picture;
mod schedule;
mod svg;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Looks at schedules without running them.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Draws a schedule: which rank sends what to whom, in which order.
    Schedule(schedule::Options),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match Options::parse().command {
        Command::Schedule(options) => schedule::run(&options),
    }
}
