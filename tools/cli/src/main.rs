//! Looks at the library from outside: draws the schedule of any collective, simulates it on machines that need not exist, and says
//! what a machine can do.

#[cfg(feature = "doctor")]
mod doctor;
mod html;
mod picture;
mod played;
mod schedule;
mod simulate;
mod svg;
mod values;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Looks at schedules without running them, and at what this machine can do.
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
    /// Says what this machine can do, what is missing for which milestone, and what mends it.
    #[cfg(feature = "doctor")]
    Doctor(doctor::Options),
    /// Says how long a schedule would take on another machine, and what it would wait for.
    Simulate(simulate::Options),
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
        #[cfg(feature = "doctor")]
        Command::Doctor(options) => doctor::run(&options),
        Command::Simulate(options) => simulate::run(&options),
    }
}
