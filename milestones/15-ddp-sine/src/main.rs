//! Milestone 15: several ranks fit sin(2πx) with a small MLP, and draw the result.

mod fit;
mod plot;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use course_kit::train::options::{self, Ranks, Training};
use fit::{SAMPLES, fit};
use tinynccl::process_group::{BackendType, ProcessGroup};

/// The fit is good when its mean squared error is below this: 3 % of the sine's amplitude.
const BOUND: f64 = 1e-3;

/// Several ranks fit sin(2πx).
#[derive(Debug, Parser)]
#[command(version)]
#[command(mut_arg("epochs", |arg| arg.default_value("300")))]
#[command(mut_arg("batch", |arg| arg.default_value("48")))]
#[command(mut_arg("rate", |arg| arg.default_value("0.02")))]
#[command(mut_arg("rate", |arg| arg.help("Adam's learning rate at the start; it falls to 0 along a cosine")))]
#[command(mut_arg("hidden", |arg| arg.default_value("32")))]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    training: Training,
    /// File for the plot.
    #[arg(long, default_value = "sine.svg", value_name = "FILE")]
    plot: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let check = |ranks| args.training.check(ranks, SAMPLES).and_then(|()| options::plot(&args.plot));
    program_kit::exit_code(args.ranks.start(BackendType::Auto, check, |group| run(group, &args)), |_| false)
}

fn run(group: ProcessGroup, args: &Args) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let last = args.training.epochs;
    let every = last.div_ceil(10);
    let result = fit(&group, &args.training, |epoch, loss| {
        if rank == 0 && (epoch == 1 || epoch == last || epoch.is_multiple_of(every)) {
            println!("epoch {epoch:>4}  loss {loss:.2e}");
        }
    })?;
    group.close()?;
    if rank == 0 {
        plot::write(&args.plot, &result, ranks)?;
        println!("\n{ranks} ranks hold the same {} weights ({:016x})", result.parameters, result.weights);
        println!("plot: {}", args.plot.display());
        println!("mean squared error on 401 points between -1 and 1: {:.2e}", result.error);
    }
    // Every rank has the result, so every rank fails if it is bad.
    if result.error.is_nan() || result.error >= BOUND {
        bail!("the fit is bad: mean squared error {:.2e}, expected below {BOUND:.0e}; try more --epochs", result.error);
    }
    if rank == 0 {
        println!("OK: below {BOUND:.0e}");
    }
    Ok(())
}
