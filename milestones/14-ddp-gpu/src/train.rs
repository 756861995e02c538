//! Training on devices, with the data, order, shards and initial weights of milestone 13.

use anyhow::{Context as _, Result, ensure};
use course_kit::train::data::{CLASSES, Dataset, epoch_order, shard};
use course_kit::train::mlp::Mlp;
use course_kit::train::options::{Epoch, Options};
use course_kit::train::proof;
use course_kit::train::rng::Rng;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaSlice, CudaStream};
use std::sync::Arc;
use tinynccl::process_group::ProcessGroup;
use tinynccl::{Comm, ReduceOp};

use crate::kernels::Kernels;
use crate::model::Batch;
use crate::replica::{Exchange, Replica};

/// The result of training.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Number of different random starts of the ranks, before the broadcast.
    pub starts: usize,
    /// Fingerprint of the weights after the broadcast, the same on all ranks.
    pub start: u64,
    /// All epochs, the same on all ranks.
    pub epochs: Vec<Epoch>,
    /// Milliseconds per step by the device's clock: the median over the epochs, on this rank.
    pub step_ms: f64,
}

/// The layer widths of the model that `options` describes.
pub fn sizes(options: &Options) -> [usize; 4] {
    [2, options.training.hidden, options.training.hidden, CLASSES]
}

/// Our shard of an epoch on the device, and each sample's result.
#[derive(Debug)]
pub struct Share {
    points: CudaSlice<f32>,
    labels: CudaSlice<u8>,
    losses: CudaSlice<f32>,
    right: CudaSlice<u8>,
}

impl Share {
    /// Copies `data` to the device.
    pub fn new(stream: &Arc<CudaStream>, data: &Dataset) -> Result<Share> {
        let copy = || -> Result<Share, cudarc::driver::DriverError> {
            let share = Share {
                points: stream.clone_htod(&data.points)?,
                labels: stream.clone_htod(&data.labels)?,
                losses: stream.alloc_zeros(data.len())?,
                right: stream.alloc_zeros(data.len())?,
            };
            // The host's memory must live until the copies have run.
            stream.synchronize()?;
            Ok(share)
        };
        copy().context("copying the samples to the device")
    }

    /// Samples `first..first + len`.
    pub fn batch(&mut self, first: usize, len: usize) -> Batch<'_> {
        let samples = first..first + len;
        Batch {
            points: self.points.slice(2 * samples.start..2 * samples.end),
            labels: self.labels.slice(samples.clone()),
            losses: self.losses.slice_mut(samples.clone()),
            right: self.right.slice_mut(samples),
        }
    }

    /// Sum of the losses, and the number of right answers. Waits for `stream`.
    pub fn totals(&self, stream: &Arc<CudaStream>) -> Result<(f64, usize)> {
        let losses = stream.clone_dtoh(&self.losses).context("copying the losses from the device")?;
        let right = stream.clone_dtoh(&self.right).context("copying the hits from the device")?;
        stream.synchronize().context("waiting for the losses")?;
        Ok((losses.iter().copied().map(f64::from).sum(), right.into_iter().map(usize::from).sum()))
    }
}

/// Trains; every rank calls it with the same options. It compares the weights before the first step and after each
/// epoch; a difference is an error on every rank.
pub fn train(
    group: &ProcessGroup,
    kernels: &Kernels,
    options: &Options,
    how: Exchange,
    mut report: impl FnMut(&Epoch),
) -> Result<Outcome> {
    let comm = group.comm();
    let (rank, ranks) = (group.rank(), group.size());
    options.check(ranks)?;
    let data = Dataset::spiral(options.points, options.training.seed);
    // Every rank starts from different weights, so only the broadcast can make them agree.
    let model = Mlp::new(&sizes(options), &mut Rng::new(options.training.seed.wrapping_add(rank as u64)));
    let starts = distinct(comm, &model)?;
    let mine = options.training.batch / ranks;
    let mut replica = Replica::new(group, kernels, &model, &sizes(options), mine, options.bucket_bytes, how)?;
    replica.broadcast()?;
    let start = replica.prove_identical().context("before the first step")?;

    let context = group.device().context("the group has no GPU")?;
    let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("making an event");
    let (begin, end) = (event()?, event()?);
    let mut epochs = Vec::with_capacity(options.training.epochs);
    let mut times = Vec::with_capacity(options.training.epochs);
    for number in 1..=options.training.epochs {
        let order = epoch_order(data.len(), options.training.seed, number);
        let steps = order.len() / options.training.batch;
        let ours: Vec<usize> =
            order.chunks_exact(options.training.batch).flat_map(|batch| shard(batch, rank, ranks)).copied().collect();
        let mut share = Share::new(replica.compute(), &data.select(&ours))?;
        begin.record(replica.compute())?;
        for step in 0..steps {
            replica.step(&mut share.batch(step * mine, mine), options.training.rate)?;
        }
        end.record(replica.compute())?;
        // So far the host has only enqueued.
        replica.synchronize().with_context(|| format!("epoch {number}"))?;
        times.push(f64::from(begin.elapsed_ms(&end)?) / steps as f64);
        let (loss, right) = share.totals(replica.compute())?;
        let mut totals = [loss, right as f64, ours.len() as f64];
        comm.all_reduce_in_place(&mut totals, ReduceOp::Sum).context("summing the losses")?;
        ensure!(totals[0].is_finite(), "the loss is {} in epoch {number}: try a smaller --rate", totals[0]);
        let weights = replica.prove_identical().with_context(|| format!("after epoch {number}"))?;
        let epoch = Epoch { number, loss: totals[0] / totals[2], accuracy: totals[1] / totals[2], weights };
        report(&epoch);
        epochs.push(epoch);
    }
    times.sort_by(f64::total_cmp);
    let step_ms = times.get(times.len() / 2).copied().unwrap_or(0.0);
    Ok(Outcome { starts, start, epochs, step_ms })
}

/// The number of different models that the ranks have.
fn distinct(comm: &Comm, model: &Mlp) -> Result<usize> {
    let ours: Vec<f32> = model.params().concat();
    let mut all = vec![0u64; comm.size()];
    comm.all_gather(&[proof::fingerprint(&ours)], &mut all).context("comparing the starts")?;
    all.sort_unstable();
    all.dedup();
    Ok(all.len())
}
