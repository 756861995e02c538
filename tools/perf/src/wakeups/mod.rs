//! Counts lost wake-ups: how often a sleeper misses a message while its waker misses that it sleeps.
//!
//! One round is a store-buffering litmus test. The waker stores a message and reads the sleeper's flag; the sleeper
//! sets its flag and looks for the message. If neither sees the other's store, a wake-up is lost. Each run is its own
//! process, because a process registers with `membarrier(2)` once. Leave the machine idle: any other program that runs
//! on the waker's core hides the fault of `global`.
//!
//! Exit code: 0 where `full`, `private`, `visited` and `link` lost nothing, 1 where one of them did or a run failed.
//! Losses of `none` and `global` are expected.

mod case;
mod fence;
mod race;

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use case::{Case, Where};
use clap::Parser;
use fence::Fence;
use program_kit::machine;

use crate::table::word;

/// Counts lost wake-ups for each way to order a waker and a sleeper.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Runs of each case.
    #[arg(short, long, default_value_t = 20)]
    runs: u32,
    /// Rounds of a run.
    #[arg(short = 'n', long, default_value_t = 20_000)]
    rounds: u64,
    /// Only these fences.
    #[arg(short, long, value_enum, value_delimiter = ',')]
    fence: Vec<Fence>,
    /// Only these placements.
    #[arg(short, long = "where", value_enum, value_delimiter = ',')]
    place: Vec<Where>,
    /// One run of the case with this number: used by the program itself.
    #[arg(long, hide = true)]
    one: Option<usize>,
}

/// Runs every requested case.
pub(crate) fn run(args: &Args) -> Result<i32> {
    let cases = Case::all();
    if let Some(number) = args.one {
        println!("{}", cases.get(number).context("no such case")?.run(args.rounds)?);
        return Ok(0);
    }
    println!("# {}, Linux {}", machine::processor(), rustix::system::uname().release().to_string_lossy());
    println!("# {} runs of {} rounds each", args.runs, args.rounds);
    println!(
        "{:8} {:10} {:10} {:6} {:>12} {:>14} {:>12} {:>12}",
        "fence", "between", "registered", "pinned", "rounds", "runs that lost", "lost", "per million"
    );
    let mut good = true;
    for (number, case) in cases.iter().enumerate() {
        let wanted = (args.fence.is_empty() || args.fence.contains(&case.fence))
            && (args.place.is_empty() || args.place.contains(&case.place));
        if !wanted {
            continue;
        }
        let one = |_| one(number, args.rounds).with_context(|| format!("{case:?}"));
        let losses = (0..args.runs).map(one).collect::<Result<Vec<_>>>()?;
        let (lost, rounds) = (losses.iter().sum::<u64>(), u64::from(args.runs) * args.rounds);
        let runs = losses.iter().filter(|&&lost| lost > 0).count();
        let registered = if case.fence.registers() { word(case.registered) } else { "-".to_owned() };
        println!(
            "{:8} {:10} {registered:10} {:6} {rounds:12} {runs:14} {lost:12} {:12.3}",
            word(case.fence),
            word(case.place),
            if case.pinned { "yes" } else { "no" },
            lost as f64 * 1e6 / rounds as f64
        );
        good &= lost == 0 || case.fence.may_lose();
    }
    Ok(i32::from(!good))
}

/// One run, in a separate process.
fn one(number: usize, rounds: u64) -> Result<u64> {
    let program = std::env::current_exe().context("finding this program")?;
    let output = Command::new(program)
        .args(["wakeups", "--one", &number.to_string(), "--rounds", &rounds.to_string()])
        .output()?;
    if !output.status.success() {
        bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("expected a number, got '{}'", text.trim()))
}
