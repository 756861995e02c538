//! Inspects the library from outside: draws the schedule of any collective, simulates it on imaginary machines, and
//! reports the capabilities of a real one.

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

/// Shows schedules without running them, and the capabilities of this machine.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Draws a schedule: the messages between ranks, in their order.
    Schedule(schedule::Options),
    /// Reports the capabilities of this machine, the missing parts per milestone, and the remedies.
    #[cfg(feature = "doctor")]
    Doctor(doctor::Options),
    /// Estimates the time of a schedule on another machine, and its bottleneck.
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
