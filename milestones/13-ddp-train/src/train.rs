//! The training loop.

use anyhow::{Context as _, Result, ensure};
use course_kit::train::data::{CLASSES, Dataset, epoch_order, shard};
use course_kit::train::mlp::Mlp;
use course_kit::train::optim::Optimizer;
use course_kit::train::options::{Epoch, Options, Training};
use course_kit::train::proof;
use course_kit::train::replica::Replica;
use course_kit::train::rng::Rng;
use tinynccl::ReduceOp;
use tinynccl::process_group::ProcessGroup;

use crate::loss::cross_entropy;
use crate::proof::compare;
use crate::step::step;

/// A part to leave out, to show its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Fault {
    /// No broadcast of the initial weights: every rank keeps its own random start.
    Broadcast,
    /// No averaging of the gradients: every rank steps along its own.
    Average,
}

/// The state before the first step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    /// Number of elements of all parameters.
    pub(crate) parameters: usize,
    /// All-reduces per step.
    pub(crate) buckets: usize,
    /// Number of points.
    pub(crate) samples: usize,
    /// Fingerprint of the initial weights, the same on all ranks.
    pub(crate) weights: u64,
}

/// Progress of a training run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    /// Before the first step.
    Start(Start),
    /// After each epoch.
    Epoch(Epoch),
}

/// Trains; every rank calls it with the same options. It compares the weights before the first step and after each
/// epoch; a difference is an error on every rank. `fault` leaves a part out.
pub(crate) fn train(
    group: &ProcessGroup,
    options: &Options,
    fault: Option<Fault>,
    mut report: impl FnMut(Event),
) -> Result<Vec<Epoch>> {
    let (rank, ranks) = (group.rank(), group.size());
    let Training { epochs, batch, rate, hidden, seed } = options.training;
    let data = Dataset::spiral(options.points, seed);
    options.check(ranks)?;
    // Every rank starts from different weights, so only the broadcast can make them agree.
    let mut rng = Rng::new(seed.wrapping_add(rank as u64));
    let model = Mlp::new(&[2, hidden, hidden, CLASSES], &mut rng);
    let optimizer = Optimizer::sgd(rate, &model.specs());
    let mut replica = Replica::new(group, model, optimizer, options.bucket_bytes)?;
    if fault != Some(Fault::Broadcast) {
        replica.broadcast()?;
    }
    let mut local: Option<Vec<Vec<f32>>> =
        (fault == Some(Fault::Average)).then(|| replica.specs.iter().map(|s| vec![0.0; s.len]).collect());
    let explain = |when: String| match fault {
        Some(Fault::Broadcast) => format!("{when} (--break broadcast: every rank kept its own random start)"),
        Some(Fault::Average) => format!("{when} (--break average: every rank followed the gradient of its own shard)"),
        None => when,
    };
    report(Event::Start(Start {
        parameters: replica.model.len(),
        buckets: if local.is_some() { 0 } else { replica.ddp.buckets() },
        samples: data.len(),
        weights: prove_identical(&replica).with_context(|| explain("before the first step".to_owned()))?,
    }));

    let mut curve = Vec::with_capacity(epochs);
    for number in 1..=epochs {
        let order = epoch_order(data.len(), seed, number);
        // Sums over our samples: loss, right answers, number of samples.
        let mut totals = [0f64; 3];
        for batch in order.chunks_exact(batch) {
            let mine = data.select(shard(batch, rank, ranks));
            let mut correct = 0;
            let loss = step(&mut replica, local.as_mut(), &mine.points, mine.len(), |outputs, d_outputs| {
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
        let weights = prove_identical(&replica).with_context(|| explain(format!("after epoch {number}")))?;
        let epoch = Epoch { number, loss: totals[0] / totals[2], accuracy: totals[1] / totals[2], weights };
        report(Event::Epoch(epoch));
        curve.push(epoch);
    }
    Ok(curve)
}

/// Proves that all ranks hold the same bits, and returns their fingerprint. The hashes go through the group's
/// communicator and not the backend, as the proof should not depend on the code under test.
fn prove_identical(replica: &Replica<'_>) -> Result<u64> {
    let params = replica.model.params();
    compare(&replica.specs, &proof::gather(replica.group.comm(), &params)?, params.len())
}

#[cfg(test)]
mod tests;
