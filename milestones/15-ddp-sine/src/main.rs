//! Milestone 15: several ranks fit sin(2πx) with the MLP of milestone 13, and draw the result.

mod fit;
mod plot;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use fit::{Options, fit};
use tinynccl::Config;
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::process_group::{BackendType, InitOptions, init_process_group};

/// The fit is good when its mean squared error is below this: 3 % of the sine's amplitude.
const BOUND: f64 = 1e-3;

/// Several ranks fit sin(2πx).
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Ranks to start on this machine (default 2). Leave it out under torchrun, mpirun or srun.
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    ranks: Option<usize>,
    /// What carries the bytes: auto, tcp, shm or verbs (default: TINYNCCL_TRANSPORT, else auto).
    #[arg(long)]
    transport: Option<TransportChoice>,
    /// Passes over the data.
    #[arg(long, default_value_t = 300, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    epochs: usize,
    /// Samples per step over all ranks together: a multiple of the number of ranks, at most 240.
    #[arg(long, default_value_t = 48, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch: usize,
    /// Adam's learning rate at the start; it falls to 0 along a cosine.
    #[arg(long, default_value_t = 0.02, value_parser = rate, allow_negative_numbers = true)]
    rate: f32,
    /// Width of the two hidden layers.
    #[arg(long, default_value_t = 32, value_parser = RangedU64ValueParser::<usize>::new().range(1..=4096))]
    hidden: usize,
    /// Seed of samples, order and weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File for the plot.
    #[arg(long, default_value = "sine.svg", value_name = "FILE")]
    plot: PathBuf,
}

fn rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("expected a positive number".to_owned()),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    program_kit::exit_code(start(&args), |_| false)
}

/// Started by hand: runs this program again, once per rank. Started by a launcher: runs as that rank.
fn start(args: &Args) -> Result<i32> {
    let mut config = Config::from_env()?;
    if let Some(transport) = args.transport {
        config.transport = transport;
    }
    let options =
        Options { epochs: args.epochs, batch: args.batch, rate: args.rate, hidden: args.hidden, seed: args.seed };
    if launch::is_rank() {
        run(args, &options, config)?;
        return Ok(0);
    }
    let ranks = args.ranks.unwrap_or(2);
    options.check(ranks)?;
    plot::check(&args.plot)?;
    Ok(Launcher::new(ranks).plain_rank0(true).run_self()?)
}

fn run(args: &Args, options: &Options, config: Config) -> Result<()> {
    let how = InitOptions::from_env().config(config);
    let group = init_process_group(BackendType::Auto, &how).context("joining the other ranks")?;
    let (rank, ranks) = (group.rank(), group.size());
    ensure!(
        args.ranks.is_none_or(|r| r == ranks),
        "--ranks {} but the launcher started {ranks}: leave --ranks out",
        args.ranks.unwrap_or_default()
    );
    let every = args.epochs.div_ceil(10);
    let result = fit(&group, options, |epoch, loss| {
        if rank == 0 && (epoch == 1 || epoch == args.epochs || epoch.is_multiple_of(every)) {
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
