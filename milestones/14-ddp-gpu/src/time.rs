//! The time of a step with and without overlap, for a model large enough to show the difference.

use anyhow::{Context as _, Result, bail, ensure};
use course_kit::train::data::{CLASSES, Dataset, epoch_order, shard};
use course_kit::train::mlp::Mlp;
use course_kit::train::options::positive;
use course_kit::train::rng::Rng;
use cudarc::driver::sys::CUevent_flags;
use tinynccl::ReduceOp;
use tinynccl::cuda::{Choice, DeviceComm, Protocol};
use tinynccl::process_group::ProcessGroup;

use crate::kernels::Kernels;
use crate::replica::{Exchange, Replica};
use crate::timeline::Timeline;
use crate::train::Share;

/// The model to time, and the measurements.
#[derive(Debug, Clone, clap::Args)]
pub struct Settings {
    /// Samples per step on each rank.
    #[arg(long, default_value_t = 256, value_parser = positive().range(1..=65_536))]
    pub batch: usize,
    /// Width of the hidden layers.
    #[arg(long, default_value_t = 2048, value_parser = positive().range(1..=16_384))]
    pub hidden: usize,
    /// Number of hidden layers.
    #[arg(long, default_value_t = 12, value_parser = positive().range(1..=64))]
    pub layers: usize,
    /// Size of a gradient bucket in bytes.
    #[arg(long, default_value_t = 25 << 20, value_parser = positive())]
    pub bucket_bytes: usize,
    /// Steps per measurement.
    #[arg(long, default_value_t = 20, value_parser = positive())]
    pub steps: usize,
    /// Measurements of each setting.
    #[arg(long, default_value_t = 5, value_parser = positive())]
    pub rounds: usize,
    /// Seed of data and weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl Settings {
    /// Widths of input, hidden layers and output.
    pub fn sizes(&self) -> Vec<usize> {
        let hidden = std::iter::repeat_n(self.hidden, self.layers);
        [2].into_iter().chain(hidden).chain([CLASSES]).collect()
    }
}

/// Variant of a step's gradient exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// Schedule of the all-reduces.
    pub how: Exchange,
    /// Blocks of each all-reduce's kernel; `None`: as many as the library chooses.
    pub blocks: Option<u32>,
}

/// The times of a [`Way`].
#[derive(Debug, Clone)]
pub struct Timed {
    /// The way that was timed.
    pub way: Way,
    /// Milliseconds per step: the median over rounds of the slowest rank's.
    pub step_ms: f64,
    /// Fingerprint of the weights after all steps, the same on all ranks; `None` for [`Exchange::Never`].
    pub weights: Option<u64>,
    /// The last step on this rank.
    pub timeline: Timeline,
}

/// Learning rate, small enough that a wide model stays finite over many steps.
const RATE: f32 = 1e-3;

/// Times each of `ways`, always from the same weights. Every rank calls it.
pub fn time(group: &ProcessGroup, kernels: &Kernels, settings: &Settings, ways: &[Way]) -> Result<Vec<Timed>> {
    let (comm, rank, ranks) = (group.comm(), group.rank(), group.size());
    let Settings { batch, steps, rounds, seed, .. } = *settings;
    let data = Dataset::spiral((batch * ranks).div_ceil(CLASSES), seed);
    let order = epoch_order(data.len(), seed, 1);
    let sizes = settings.sizes();
    let model = Mlp::new(&sizes, &mut Rng::new(seed));
    let mut replica = Replica::new(group, kernels, &model, &sizes, batch, settings.bucket_bytes, Exchange::Overlapped)?;
    let mut share = Share::new(replica.compute(), &data.select(shard(&order[..batch * ranks], rank, ranks)))?;
    let context = group.device().context("the group has no GPU")?;
    let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("making an event");
    let (begin, end) = (event()?, event()?);
    let timed = ways
        .iter()
        .map(|&way| {
            replica.load(&model)?;
            replica.set_exchange(way.how);
            set_blocks(group.device_comm(), way.blocks)?;
            let mut times = Vec::new();
            // The first round warms up.
            for _ in 0..=rounds {
                replica.synchronize()?;
                comm.barrier()?;
                begin.record(replica.compute())?;
                for _ in 0..steps {
                    replica.step(&mut share.batch(0, batch), RATE)?;
                }
                end.record(replica.compute())?;
                replica.synchronize()?;
                let mut slowest = [f64::from(begin.elapsed_ms(&end)?) / steps as f64];
                comm.all_reduce_in_place(&mut slowest, ReduceOp::Max).context("comparing the times")?;
                times.push(slowest[0]);
            }
            times.remove(0);
            times.sort_by(f64::total_cmp);
            let (loss, _) = share.totals(replica.compute())?;
            ensure!(loss.is_finite(), "the loss is {loss}: a step went wrong");
            let weights = match way.how {
                Exchange::Never => None,
                _ => Some(replica.prove_identical().with_context(|| format!("after the steps of {way:?}"))?),
            };
            Ok(Timed { way, step_ms: times[times.len() / 2], weights, timeline: replica.timeline()? })
        })
        .collect();
    set_blocks(group.device_comm(), None)?;
    timed
}

/// Sets the number of blocks of an all-reduce; `None`: the library chooses.
fn set_blocks(device: Option<&DeviceComm>, blocks: Option<u32>) -> Result<()> {
    match (device, blocks) {
        (Some(device), blocks) => {
            device.set_choice(blocks.map(|blocks| Choice { protocol: Protocol::Simple, blocks }));
        }
        (None, Some(_)) => bail!("only backend tinynccl can be told between two calls how many blocks to take"),
        (None, None) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths() {
        let settings = Settings { hidden: 8, layers: 3, batch: 1, bucket_bytes: 1, steps: 1, rounds: 1, seed: 1 };
        assert_eq!(settings.sizes(), [2, 8, 8, 8, 3]);
    }
}
