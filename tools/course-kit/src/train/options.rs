//! The options of a training program: its settings, and how its ranks are started.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use program_kit::Usage;
use replay::Replay;
use tinynccl::Config;
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::process_group::{BackendType, InitOptions, ProcessGroup, init_process_group};

use super::data::CLASSES;

/// Settings of every training, equal on all ranks.
#[derive(Debug, Clone, Args)]
pub struct Training {
    /// Passes over the data.
    #[arg(long, default_value_t = 60, value_parser = positive())]
    pub epochs: usize,
    /// Samples per step over all ranks together: a multiple of the number of ranks.
    #[arg(long, default_value_t = 96, value_parser = positive())]
    pub batch: usize,
    /// Learning rate.
    #[arg(long, default_value_t = 0.1, value_parser = rate, allow_negative_numbers = true)]
    pub rate: f32,
    /// Width of the two hidden layers.
    #[arg(long, default_value_t = 64, value_parser = positive().range(1..=4096))]
    pub hidden: usize,
    /// Seed of data, order and weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl Training {
    /// Refuses settings that do not work with this many ranks and samples.
    pub fn check(&self, ranks: usize, samples: usize) -> Result<()> {
        let batch = self.batch;
        ensure!(
            batch > 0 && batch.is_multiple_of(ranks),
            Usage(format!(
                "a global batch of {batch} cannot be shared equally by {ranks} ranks: take a multiple of {ranks}"
            ))
        );
        ensure!(
            batch <= samples,
            Usage(format!("a global batch of {batch} is larger than the data ({samples} points)"))
        );
        Ok(())
    }
}

/// Settings of a training on spirals, equal on all ranks.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Settings of every training.
    #[command(flatten)]
    pub training: Training,
    /// Points per spiral arm.
    #[arg(long, default_value_t = 128, value_parser = positive().range(1..=1_000_000))]
    pub points: usize,
    /// Size of a gradient bucket in bytes.
    #[arg(long, default_value_t = 8192, value_parser = positive())]
    pub bucket_bytes: usize,
}

impl Options {
    /// Refuses settings that do not work with this many ranks.
    pub fn check(&self, ranks: usize) -> Result<()> {
        self.training.check(ranks, CLASSES * self.points)
    }
}

/// The result of an epoch, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epoch {
    /// Counted from 1.
    pub number: usize,
    /// Mean over the epoch's samples of the loss at the step that used each of them.
    pub loss: f64,
    /// Fraction of them that the model classified correctly.
    pub accuracy: f64,
    /// Fingerprint of the weights.
    pub weights: u64,
}

/// Refuses a plot that cannot be written, before the training.
///
/// # Errors
/// There is no such folder, or the path is one.
pub fn plot(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), Usage(format!("--plot {}: there is no folder {}", path.display(), folder.display())));
    ensure!(!path.is_dir(), Usage(format!("--plot {}: this is a folder, expected a file", path.display())));
    Ok(())
}

/// Whole numbers from 1.
pub fn positive() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("expected a positive number".to_owned()),
    }
}

/// Start and transport of the ranks.
#[derive(Debug, Clone, Args)]
pub struct Ranks {
    /// Ranks to start on this machine (default 2). Leave it out under torchrun, mpirun or srun.
    #[arg(long, value_parser = positive().range(1..=256))]
    ranks: Option<usize>,
    /// Transport of the bytes: auto, tcp, shm or verbs (default: TINYNCCL_TRANSPORT, else auto).
    #[arg(long)]
    transport: Option<TransportChoice>,
    #[command(flatten)]
    replay: Replay,
}

impl Ranks {
    /// Started by hand: lets `check` refuse the number of ranks, then runs this program again, once per rank. Started
    /// by a launcher: joins the other ranks and does the `work` of one. Returns the exit code.
    pub fn start(
        &self,
        backend: BackendType,
        check: impl FnOnce(usize) -> Result<()>,
        work: impl FnOnce(ProcessGroup) -> Result<()>,
    ) -> Result<i32> {
        self.replay.around(launch::is_rank(), || self.launch(backend, check, work))
    }

    fn launch(
        &self,
        backend: BackendType,
        check: impl FnOnce(usize) -> Result<()>,
        work: impl FnOnce(ProcessGroup) -> Result<()>,
    ) -> Result<i32> {
        let mut config = Config::from_env()?;
        config.transport = self.transport.unwrap_or(config.transport);
        if !launch::is_rank() {
            let ranks = self.ranks.unwrap_or(2);
            check(ranks)?;
            return Ok(Launcher::new(ranks).plain_rank0(true).run_self()?);
        }
        let how = InitOptions::from_env().config(config);
        let group = init_process_group(backend, &how).context("joining the other ranks")?;
        let launched = group.size();
        ensure!(
            self.ranks.is_none_or(|ranks| ranks == launched),
            "--ranks {} but the launcher started {launched}: leave --ranks out",
            self.ranks.unwrap_or_default()
        );
        work(group)?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_in_a_folder_that_is_not_there_is_refused() {
        let path = Path::new("/nowhere/fit.svg");
        assert!(plot(path).unwrap_err().to_string().contains("no folder /nowhere"));
        assert!(plot(Path::new("/")).is_err() && plot(Path::new("fit.svg")).is_ok());
    }
}
