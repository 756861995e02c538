//! Inspects the library from outside: draws the schedule of any collective, simulates it on imaginary machines, and
//! reports the capabilities of a real one. Draws the machines that a job is on. Shows what a running job waits for.
//! Plays runs from their traces. Starts programs of NCCL's over this library.

#[cfg(feature = "doctor")]
mod doctor;
mod html;
#[cfg(feature = "doctor")]
mod mesh;
#[cfg(feature = "pages")]
mod pages;
mod picture;
mod played;
mod program;
mod replay;
#[cfg(feature = "doctor")]
mod run;
mod schedule;
mod simulate;
#[cfg(feature = "doctor")]
mod status;
mod svg;
mod topology;
mod values;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use tinynccl_plan::algorithm::{self, Shape};
use tinynccl_plan::wire::Algorithm;

/// Shows and simulates schedules, describes machines, reports on running jobs, and starts programs over tinynccl.
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
    #[cfg(feature = "doctor")]
    Mesh(mesh::Options),
    #[cfg(feature = "pages")]
    Pages(pages::Options),
    #[cfg(feature = "doctor")]
    Program(program::run::Options),
    #[cfg(feature = "doctor")]
    Run(run::Options),
    #[cfg(feature = "doctor")]
    Status(status::Options),
    #[cfg(feature = "doctor")]
    Watch(status::watch::Options),
    /// Writes a page that plays a run from its trace, or two runs side by side.
    Replay(replay::Options),
    /// Estimates the time of a schedule on another machine, and its bottleneck.
    Simulate(simulate::Options),
    Topology(topology::Options),
}

fn main() -> ExitCode {
    program_kit::process::heed_children();
    program_kit::exit_code(run(), |_| false)
}

/// The exit status.
fn run() -> Result<i32> {
    let done = match Options::parse().command {
        Command::Schedule(options) => schedule::run(&options),
        #[cfg(feature = "doctor")]
        Command::Doctor(options) => doctor::run(&options),
        #[cfg(feature = "doctor")]
        Command::Mesh(options) => return mesh::run(&options),
        #[cfg(feature = "pages")]
        Command::Pages(options) => pages::run(&options),
        #[cfg(feature = "doctor")]
        Command::Program(options) => return program::run::run(&options),
        #[cfg(feature = "doctor")]
        Command::Run(options) => run::run(&options),
        #[cfg(feature = "doctor")]
        Command::Status(options) => return status::run(&options),
        #[cfg(feature = "doctor")]
        Command::Watch(options) => return status::watch::run(&options),
        Command::Replay(options) => replay::run(&options),
        Command::Simulate(options) => simulate::run(&options),
        Command::Topology(options) => topology::run(&options),
    };
    done.map(|()| 0)
}

/// Writes to the standard output. A reader that has gone, as `head`, is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("writing to the standard output"),
    }
}

/// The error where `algorithm` has no schedule.
fn no_schedule(algorithm: Algorithm, shape: &Shape) -> String {
    let others: Vec<&str> = Algorithm::ALL.iter().filter(|a| has_schedule(**a, shape)).map(|a| a.name()).collect();
    let Shape { collective, ranks, .. } = shape;
    format!("{algorithm} has no schedule for {collective} on {ranks} ranks, these have: {}", others.join(", "))
}

fn has_schedule(algorithm: Algorithm, shape: &Shape) -> bool {
    algorithm::supports(algorithm, shape) && algorithm::program(algorithm, shape, 0).is_some()
}
