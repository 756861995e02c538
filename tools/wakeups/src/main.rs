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

use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use case::{Case, Registered, Where};
use clap::Parser;
use fence::Fence;
use program_kit::machine;

/// Counts lost wake-ups for each way to order a waker and a sleeper.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Runs of each case.
    #[arg(short, long, default_value_t = 20)]
    runs: u32,
    /// Rounds of a run.
    #[arg(short = 'n', long, default_value_t = 20_000)]
    rounds: u64,
    /// Only these.
    #[arg(short, long, value_enum, value_delimiter = ',')]
    fence: Vec<Fence>,
    /// Only these.
    #[arg(short, long = "where", value_enum, value_delimiter = ',')]
    place: Vec<Where>,
    /// One run of this case: used by the program itself.
    #[arg(long, hide = true)]
    one: Option<Case>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.one {
        Some(case) => case.run(args.rounds).map(|lost| {
            println!("{lost}");
            true
        }),
        None => all(&args),
    };
    program_kit::exit_code(outcome.map(|good| i32::from(!good)), |_| false)
}

/// Runs every requested case; true unless a case lost wake-ups that must not lose any.
fn all(args: &Args) -> Result<bool> {
    println!("# {}, Linux {}", machine::processor(), rustix::system::uname().release().to_string_lossy());
    println!("# {} runs of {} rounds each", args.runs, args.rounds);
    println!(
        "{:8} {:10} {:10} {:6} {:>12} {:>14} {:>12} {:>12}",
        "fence", "between", "registered", "pinned", "rounds", "runs that lost", "lost", "per million"
    );
    let mut good = true;
    for case in Case::all() {
        let wanted = (args.fence.is_empty() || args.fence.contains(&case.fence))
            && (args.place.is_empty() || args.place.contains(&case.place));
        if !wanted {
            continue;
        }
        let mut losses = Vec::new();
        for _ in 0..args.runs {
            losses.push(one(&case, args.rounds)?);
        }
        let (lost, rounds) = (losses.iter().sum::<u64>(), u64::from(args.runs) * args.rounds);
        let runs = losses.iter().filter(|&&lost| lost > 0).count();
        let registered = match case.registered {
            _ if !case.fence.registers() => "-",
            Registered::Early => "early",
            Registered::Late => "late",
        };
        println!(
            "{:8} {:10} {registered:10} {:6} {rounds:12} {runs:14} {lost:12} {:12.3}",
            case.fence.to_string(),
            case.place.to_string(),
            if case.pinned { "yes" } else { "no" },
            lost as f64 * 1e6 / rounds as f64
        );
        good &= lost == 0 || case.fence.may_lose();
    }
    Ok(good)
}

/// One run, in a separate process.
fn one(case: &Case, rounds: u64) -> Result<u64> {
    let program = std::env::current_exe().context("finding this program")?;
    let output = Command::new(program)
        .args(["--one", &case.to_string(), "--rounds", &rounds.to_string()])
        .output()
        .with_context(|| format!("running {case}"))?;
    if !output.status.success() {
        bail!("{case}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("{case}: expected a number, got '{}'", text.trim()))
}
