//! Milestone 14: the MLP of milestone 13 on GPUs, with gradients averaged while backward still runs.

mod cli;
mod show;

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use ddp_gpu::kernels::Kernels;
use tinynccl::cuda;
use tinynccl::launch::{self, Launcher};
use tinynccl::process_group::{BackendType, Device, InitOptions, init_process_group, nccl_library};
use tinynccl::{Config, Error};

use cli::{Cli, Mode};

fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let done = cli.replay.around(launch::is_rank(), || start(&cli));
    program_kit::exit_code(done, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}

/// Started by hand: runs this program again, once per rank. Started by a launcher: runs as that rank.
fn start(cli: &Cli) -> Result<i32> {
    // Checked before the ranks start, so a machine without GPUs gets one line and not one per rank.
    let gpus = cuda::device_count()?;
    cuda::nvrtc()?;
    if cli.backend == BackendType::Nccl {
        nccl_library(&Config::from_env()?)?;
    }
    if launch::is_rank() {
        run(cli)?;
        return Ok(0);
    }
    let ranks = cli.ranks.unwrap_or(gpus);
    ensure!(gpus > 0, Error::Unsupported { what: "CUDA".to_owned(), detail: "the driver sees no GPU".to_owned() });
    if cli.mode.is_none() {
        cli.train.options.check(ranks)?;
    }
    Ok(Launcher::new(ranks).plain_rank0(true).run_self()?)
}

fn run(cli: &Cli) -> Result<()> {
    // If there are more ranks than GPUs, they share them.
    let how = InitOptions::from_env().device(Device::LocalRank);
    let group = init_process_group(cli.backend, &how).context("joining the other ranks")?;
    ensure!(
        cli.ranks.is_none_or(|ranks| ranks == group.size()),
        "--ranks {} but the launcher started {}: leave --ranks out",
        cli.ranks.unwrap_or_default(),
        group.size()
    );
    let kernels = Kernels::new(group.device().context("the group has no GPU")?)?;
    match &cli.mode {
        None => show::train(&group, &kernels, &cli.train)?,
        Some(Mode::Time(arguments)) => show::time(&group, &kernels, arguments)?,
    }
    Ok(group.close()?)
}
