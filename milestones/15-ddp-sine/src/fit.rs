//! Fits sin(2πx) over two periods with a small MLP.

use std::f64::consts::TAU;

use anyhow::{Context as _, Result, ensure};
use course_kit::train::data::{epoch_order, shard};
use course_kit::train::loss::mean_squared_error;
use course_kit::train::mlp::Mlp;
use course_kit::train::optim::Optimizer;
use course_kit::train::options::Training;
use course_kit::train::replica::Replica;
use course_kit::train::rng::Rng;
use tinynccl::ReduceOp;
use tinynccl::process_group::ProcessGroup;

/// Samples drawn from [-1, 1).
pub(crate) const SAMPLES: usize = 240;
/// Points of the grid that the error is measured on, which are not the training points.
const GRID: usize = 401;
/// Bytes of a gradient bucket: the model's 4.5 KB fill two.
const BUCKET: usize = 4096;

/// The outcome, the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fit {
    /// Training loss (mean squared error) per epoch.
    pub(crate) losses: Vec<f64>,
    /// Points (x, prediction) on an even grid.
    pub(crate) curve: Vec<(f64, f64)>,
    /// Mean squared error on the grid.
    pub(crate) error: f64,
    /// Fingerprint of the weights.
    pub(crate) weights: u64,
    /// Number of elements of all parameters.
    pub(crate) parameters: usize,
}

/// The function to fit.
pub(crate) fn target(x: f64) -> f64 {
    (TAU * x).sin()
}

/// Trains; calls `report` with each epoch's number (from 1) and loss.
// EXERCISE 1 (How it works): the training loop with the parts of `course_kit::train`: the same samples on all ranks,
// other weights, a replica, its broadcast, epochs of shared batches, the mean loss of each, the proof, and the
// prediction.
pub(crate) fn fit(group: &ProcessGroup, options: &Training, mut report: impl FnMut(usize, f64)) -> Result<Fit> {
    let (rank, ranks) = (group.rank(), group.size());
    options.check(ranks, SAMPLES)?;
    // The samples depend on the seed alone, so all ranks draw the same; the weights differ until the broadcast.
    let mut rng = Rng::new(options.seed);
    let xs: Vec<f32> = (0..SAMPLES).map(|_| 2.0 * rng.uniform() - 1.0).collect();
    let ys: Vec<f32> = xs.iter().map(|&x| target(f64::from(x)) as f32).collect();
    let mut rng = Rng::new(options.seed.wrapping_add(1 + rank as u64));
    let model = Mlp::new(&[1, options.hidden, options.hidden, 1], &mut rng);
    let parameters = model.len();
    let optimizer = Optimizer::adam(options.rate, &model.specs());
    let mut replica = Replica::new(group, model, optimizer, BUCKET)?;
    replica.broadcast()?;

    let steps = options.epochs * (SAMPLES / options.batch);
    let mut step = 0;
    let mut losses = Vec::with_capacity(options.epochs);
    for number in 1..=options.epochs {
        let order = epoch_order(SAMPLES, options.seed, number);
        let mut totals = [0f64; 2];
        for batch in order.chunks_exact(options.batch) {
            let mine = shard(batch, rank, ranks);
            let input: Vec<f32> = mine.iter().map(|&i| xs[i]).collect();
            let targets: Vec<f32> = mine.iter().map(|&i| ys[i]).collect();
            replica.optimizer.set_rate(options.rate * cosine(step, steps));
            let loss = replica.step(&input, mine.len(), |outputs, d| mean_squared_error(outputs, &targets, d))?;
            totals[0] += loss * mine.len() as f64;
            totals[1] += mine.len() as f64;
            step += 1;
        }
        group.all_reduce_in_place(&mut totals, ReduceOp::Sum).context("summing the losses")?;
        let loss = totals[0] / totals[1];
        ensure!(loss.is_finite(), "the loss is {loss} in epoch {number}: try a smaller --rate");
        report(number, loss);
        losses.push(loss);
    }
    let weights = replica.prove_identical().context("after training")?;

    let grid: Vec<f32> = (0..GRID).map(|i| 2.0 * i as f32 / (GRID - 1) as f32 - 1.0).collect();
    let curve: Vec<(f64, f64)> =
        grid.iter().zip(replica.predict(&grid, GRID)).map(|(x, y)| (f64::from(*x), f64::from(*y))).collect();
    let error = curve.iter().map(|(x, y)| (y - target(*x)).powi(2)).sum::<f64>() / GRID as f64;
    Ok(Fit { losses, curve, error, weights, parameters })
}

/// The factor of the learning rate, which falls from 1 to 0 over the training.
// EXERCISE 2 (How it works): the factor of the rate at a step: half a cosine from 1 to 0.
fn cosine(step: usize, steps: usize) -> f32 {
    0.5 * (1.0 + (std::f32::consts::PI * step as f32 / steps.max(1) as f32).cos())
}

#[cfg(test)]
mod tests {
    use tinynccl::{Comm, Config};

    use super::*;

    /// The program's default settings.
    fn defaults() -> Training {
        <crate::Args as clap::Parser>::parse_from(["ddp-sine"]).training
    }

    fn run(ranks: usize, options: &Training) -> Vec<Result<Fit>> {
        let comms = Comm::threads(ranks, Config::default()).unwrap();
        let groups: Vec<ProcessGroup> = comms.into_iter().map(ProcessGroup::from).collect();
        std::thread::scope(|scope| {
            // A rank that panics takes its communicator with it, so the others fail instead of waiting.
            let threads: Vec<_> =
                groups.into_iter().map(|g| scope.spawn(move || fit(&g, options, |_, _| ()))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn fit_reaches_the_bound_with_the_defaults() {
        let fit = run(1, &defaults()).remove(0).unwrap();
        assert!(fit.error < crate::BOUND, "{}", fit.error);
        // A sine has mean square 1/2.
        approx::assert_abs_diff_eq!(fit.losses[0], 0.5, epsilon = 0.3);
    }

    #[test]
    fn fit_is_the_same_on_one_rank_and_two() {
        let options = Training { epochs: 10, ..defaults() };
        let one = run(1, &options).remove(0).unwrap();
        let two: Vec<Fit> = run(2, &options).into_iter().map(Result::unwrap).collect();
        assert_eq!(two[0], two[1]);
        for (a, b) in one.losses.iter().zip(&two[0].losses) {
            approx::assert_relative_eq!(a, b, max_relative = 1e-3);
        }
    }

    #[test]
    fn cosine_falls_from_one_to_zero() {
        assert_eq!(cosine(0, 10), 1.0);
        approx::assert_abs_diff_eq!(cosine(5, 10), 0.5, epsilon = 1e-6);
        approx::assert_abs_diff_eq!(cosine(10, 10), 0.0, epsilon = 1e-6);
    }

    #[test]
    fn batches_that_cannot_be_shared_are_refused() {
        assert!(defaults().check(5, SAMPLES).unwrap_err().to_string().contains("multiple of 5"));
        assert!(Training { batch: 480, ..defaults() }.check(2, SAMPLES).is_err());
    }
}
