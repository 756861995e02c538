//! Milestone 13: several ranks train an MLP on three spirals and prove after every epoch that their weights are the
//! same.

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use ddp_train::replica::Fault;
use ddp_train::train::{Event, Options, train};
use tinynccl::Config;
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::process_group::{BackendType, InitOptions, init_process_group};

/// Data-parallel training of an MLP, with a proof that the weights are identical on all ranks.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Ranks to start on this machine (default 2). Leave it out under torchrun, mpirun or srun.
    #[arg(long, value_parser = positive().range(1..=256))]
    ranks: Option<usize>,
    /// What carries the bytes: auto, tcp, shm or verbs (default: TINYNCCL_TRANSPORT, else auto).
    #[arg(long)]
    transport: Option<TransportChoice>,
    /// Library that carries the gradients: auto, tinynccl, mpi (needs the cargo feature `mpi`, and mpirun), or nccl
    /// (fails, as it carries no host memory).
    #[arg(long, default_value = "auto")]
    backend: BackendType,
    /// Passes over the data.
    #[arg(long, default_value_t = 60, value_parser = positive())]
    epochs: usize,
    /// Samples per step over all ranks together: a multiple of the number of ranks.
    #[arg(long, default_value_t = 96, value_parser = positive())]
    batch: usize,
    /// Learning rate.
    #[arg(long, default_value_t = 0.1, value_parser = rate, allow_negative_numbers = true)]
    rate: f32,
    /// Points per spiral arm.
    #[arg(long, default_value_t = 128, value_parser = positive().range(1..=1_000_000))]
    points: usize,
    /// Width of the two hidden layers.
    #[arg(long, default_value_t = 64, value_parser = positive().range(1..=4096))]
    hidden: usize,
    /// Seed of data, order and weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of a gradient bucket in bytes.
    #[arg(long, default_value_t = 8192, value_parser = positive())]
    bucket_bytes: usize,
    /// Leave a part out on purpose, so that the proof fails.
    #[arg(long = "break", value_name = "WHAT")]
    fault: Option<BreakArg>,
}

/// The part that `--break` leaves out.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum BreakArg {
    /// The broadcast of the initial weights.
    Broadcast,
    /// The averaging of the gradients.
    Average,
}

impl Args {
    fn options(&self) -> Options {
        Options {
            epochs: self.epochs,
            batch: self.batch,
            rate: self.rate,
            points: self.points,
            hidden: self.hidden,
            seed: self.seed,
            bucket_bytes: self.bucket_bytes,
            fault: self.fault.map(|fault| match fault {
                BreakArg::Broadcast => Fault::Broadcast,
                BreakArg::Average => Fault::Average,
            }),
        }
    }
}

/// Whole numbers from 1.
fn positive() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..)
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
    let options = args.options();
    if launch::is_rank() {
        run(args, &options, config)?;
        return Ok(0);
    }
    let ranks = args.ranks.unwrap_or(2);
    options.check(ranks)?;
    Ok(Launcher::new(ranks).plain_rank0(true).run_self()?)
}

fn run(args: &Args, options: &Options, config: Config) -> Result<()> {
    let how = InitOptions::from_env().config(config);
    let group = init_process_group(args.backend, &how).context("joining the other ranks")?;
    let (rank, ranks) = (group.rank(), group.size());
    ensure!(
        args.ranks.is_none_or(|r| r == ranks),
        "--ranks {} but the launcher started {ranks}: leave --ranks out",
        args.ranks.unwrap_or_default()
    );
    let every = args.epochs.div_ceil(12);
    let epochs = train(&group, options, |event| match event {
        _ if rank != 0 => (),
        Event::Start(start) => {
            println!(
                "{ranks} ranks, MLP 2-{hidden}-{hidden}-3 with {} parameters in {} buckets, {} points, \
                 global batch {} ({} per rank)\n",
                start.parameters,
                start.buckets,
                start.samples,
                args.batch,
                args.batch / ranks,
                hidden = args.hidden
            );
            println!("epoch     loss  accuracy  weights (compared over all ranks)");
            println!("{:>5} {:>8} {:>9}  {:016x} identical", 0, "-", "-", start.weights);
        }
        Event::Epoch(e) if e.number == 1 || e.number == args.epochs || e.number.is_multiple_of(every) => {
            let accuracy = 100.0 * e.accuracy;
            println!("{:>5} {:>8.5} {accuracy:>7.1} %  {:016x} identical", e.number, e.loss, e.weights);
        }
        Event::Epoch(_) => (),
    })?;
    group.close()?;
    if rank == 0 {
        println!("\nOK: world of size {ranks}, {} comparisons, the same bits each time", epochs.len() + 1);
    }
    Ok(())
}
