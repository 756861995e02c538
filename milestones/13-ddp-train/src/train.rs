//! The training loop of milestone 13.

use anyhow::{Context as _, Result, ensure};
use tinynccl::ReduceOp;
use tinynccl::process_group::ProcessGroup;

use crate::data::{CLASSES, Dataset, epoch_order, shard};
use crate::loss::cross_entropy;
use crate::mlp::Mlp;
use crate::optim::Optimizer;
use crate::options::{Training, positive};
use crate::replica::{Fault, Replica};
use crate::rng::Rng;

/// Settings of a training run on spirals, equal on all ranks.
#[derive(Debug, Clone, clap::Args)]
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
    /// The part to leave out.
    #[arg(skip)]
    pub fault: Option<Fault>,
}

impl Options {
    /// Refuses settings that do not work with this many ranks.
    pub fn check(&self, ranks: usize) -> Result<()> {
        self.training.check(ranks, CLASSES * self.points)
    }
}

/// The state before the first step.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// Number of elements of all parameters.
    pub parameters: usize,
    /// All-reduces per step.
    pub buckets: usize,
    /// Number of points.
    pub samples: usize,
    /// Fingerprint of the initial weights, the same on all ranks.
    pub weights: u64,
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

/// Progress of a training run.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// Before the first step.
    Start(Start),
    /// After each epoch.
    Epoch(Epoch),
}

/// Trains; every rank calls it with the same options. It compares the weights before the first step and after each
/// epoch; a difference is an error on every rank.
pub fn train(group: &ProcessGroup, options: &Options, mut report: impl FnMut(Event)) -> Result<Vec<Epoch>> {
    let (rank, ranks) = (group.rank(), group.size());
    let Training { epochs, batch, rate, hidden, seed } = options.training;
    let data = Dataset::spiral(options.points, seed);
    options.check(ranks)?;
    // Every rank starts from different weights, so only the broadcast can make them agree.
    let mut rng = Rng::new(seed.wrapping_add(rank as u64));
    let model = Mlp::new(&[2, hidden, hidden, CLASSES], &mut rng);
    let optimizer = Optimizer::sgd(rate, &model.specs());
    let mut replica = Replica::new(group, model, optimizer, options.bucket_bytes, options.fault)?;
    let explain = |when: String| match options.fault {
        Some(Fault::Broadcast) => format!("{when} (--break broadcast: every rank kept its own random start)"),
        Some(Fault::Average) => format!("{when} (--break average: every rank followed the gradient of its own shard)"),
        None => when,
    };
    report(Event::Start(Start {
        parameters: replica.model().len(),
        buckets: replica.buckets(),
        samples: data.len(),
        weights: replica.prove_identical().with_context(|| explain("before the first step".to_owned()))?,
    }));

    let mut curve = Vec::with_capacity(epochs);
    for number in 1..=epochs {
        let order = epoch_order(data.len(), seed, number);
        // Sums over our samples: loss, right answers, number of samples.
        let mut totals = [0f64; 3];
        for batch in order.chunks_exact(batch) {
            let mine = data.select(shard(batch, rank, ranks));
            let mut correct = 0;
            let loss = replica.step(&mine.points, mine.len(), |outputs, d_outputs| {
                let result = cross_entropy(outputs, &mine.labels, d_outputs);
                correct = result.correct;
                result.loss
            })?;
            totals[0] += loss * mine.len() as f64;
            totals[1] += correct as f64;
            totals[2] += mine.len() as f64;
        }
        group.all_reduce_in_place(&mut totals, ReduceOp::Sum).context("summing the losses")?;
        ensure!(totals[0].is_finite(), "the loss is {} in epoch {number}: try a smaller --rate", totals[0]);
        let weights = replica.prove_identical().with_context(|| explain(format!("after epoch {number}")))?;
        let epoch = Epoch { number, loss: totals[0] / totals[2], accuracy: totals[1] / totals[2], weights };
        report(Event::Epoch(epoch));
        curve.push(epoch);
    }
    Ok(curve)
}

#[cfg(test)]
mod tests;
