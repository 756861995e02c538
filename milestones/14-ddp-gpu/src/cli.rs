//! The command line.

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};
use ddp_gpu::time::Settings;
use ddp_train::train::Options;
use tinynccl::process_group::BackendType;

/// Data-parallel training of an MLP on GPUs; without a command it trains and checks.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    /// Ranks to start (default: one per GPU); if there are more ranks than GPUs, they share them. Leave it out under
    /// torchrun, mpirun or srun.
    #[arg(long, global = true, value_parser = positive().range(1..=64))]
    pub(crate) ranks: Option<usize>,
    /// Library that carries the gradients: auto, tinynccl or nccl (NVIDIA's, loaded at run time; it needs a GPU per
    /// rank).
    #[arg(long, global = true, default_value = "auto")]
    pub(crate) backend: BackendType,
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) train: TrainArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Times a step of a larger model: no all-reduces, all-reduces behind backward, and overlapped with it.
    Time(TimeArgs),
}

/// The options of milestone 13.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Passes over the data.
    #[arg(long, default_value_t = 60, value_parser = positive())]
    pub(crate) epochs: usize,
    /// Samples per step over all ranks together: a multiple of the number of ranks.
    #[arg(long, default_value_t = 96, value_parser = positive())]
    pub(crate) batch: usize,
    /// Learning rate.
    #[arg(long, default_value_t = 0.1, value_parser = rate, allow_negative_numbers = true)]
    rate: f32,
    /// Points per spiral arm.
    #[arg(long, default_value_t = 128, value_parser = positive().range(1..=1_000_000))]
    points: usize,
    /// Width of the two hidden layers.
    #[arg(long, default_value_t = 64, value_parser = positive().range(1..=4096))]
    pub(crate) hidden: usize,
    /// Seed of data, order and weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of a gradient bucket in bytes.
    #[arg(long, default_value_t = 8192, value_parser = positive())]
    bucket_bytes: usize,
    /// Run the all-reduces after backward.
    #[arg(long)]
    pub(crate) no_overlap: bool,
}

impl TrainArgs {
    pub(crate) fn options(&self) -> Options {
        Options {
            epochs: self.epochs,
            batch: self.batch,
            rate: self.rate,
            points: self.points,
            hidden: self.hidden,
            seed: self.seed,
            bucket_bytes: self.bucket_bytes,
            fault: None,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct TimeArgs {
    /// Samples per step on each rank.
    #[arg(long, default_value_t = 256, value_parser = positive().range(1..=65_536))]
    batch: usize,
    /// Width of the hidden layers.
    #[arg(long, default_value_t = 2048, value_parser = positive().range(1..=16_384))]
    hidden: usize,
    /// Number of hidden layers.
    #[arg(long, default_value_t = 12, value_parser = positive().range(1..=64))]
    layers: usize,
    /// Size of a gradient bucket in bytes.
    #[arg(long, default_value_t = 25 << 20, value_parser = positive())]
    bucket_bytes: usize,
    /// Blocks of an all-reduce's kernel in the last measurement: fewer take fewer SMs from backward.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) blocks: u32,
    /// Steps per measurement.
    #[arg(long, default_value_t = 20, value_parser = positive())]
    steps: usize,
    /// Measurements of each setting.
    #[arg(long, default_value_t = 5, value_parser = positive())]
    rounds: usize,
    /// Seed of data and weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl TimeArgs {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            hidden: self.hidden,
            layers: self.layers,
            batch: self.batch,
            bucket_bytes: self.bucket_bytes,
            steps: self.steps,
            rounds: self.rounds,
            seed: self.seed,
        }
    }
}

/// Whole numbers from 1.
fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("expected a positive number".to_owned()),
    }
}
