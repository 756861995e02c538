//! The command line.

use clap::{Args, Parser, Subcommand};
use course_kit::train::options::{Options, positive};
use ddp_gpu::time::Settings;
use replay::Replay;
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
    #[command(flatten)]
    pub(crate) replay: Replay,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Times a step of a larger model: no all-reduces, all-reduces behind backward, and overlapped with it.
    Time(TimeArgs),
}

/// The options of milestone 13, and one more.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) options: Options,
    /// Run the all-reduces after backward.
    #[arg(long)]
    pub(crate) no_overlap: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TimeArgs {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Blocks of an all-reduce's kernel in the last measurement: fewer take fewer SMs from backward.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) blocks: u32,
}
