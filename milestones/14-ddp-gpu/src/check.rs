//! The comparisons: with one rank that has the whole batch, and with the same training on the CPU.

use anyhow::{Context as _, Result, ensure};
use course_kit::train::data::{Dataset, epoch_order};
use course_kit::train::loss::{Classified, cross_entropy};
use course_kit::train::mlp::{Mlp, Trace};
use course_kit::train::optim::Optimizer;
use course_kit::train::options::{Epoch, Options, Training};
use course_kit::train::proof;
use course_kit::train::rng::Rng;
use tinynccl::process_group::{BackendType, Device, ProcessGroup};
use tinynccl::{Comm, Config};

use crate::kernels::Kernels;
use crate::replica::{Exchange, Replica};
use crate::train::{Outcome, Share, sizes, train};

/// Largest relative difference of losses: sums in another order, `tanh` and `exp` of another library, over all steps.
pub const LOSS_TOLERANCE: f64 = 1e-3;
/// Largest difference of gradients of one step, relative to the largest gradient of the same parameter.
pub const GRADIENT_TOLERANCE: f64 = 1e-4;
/// Above this many floating-point operations the training on the CPU is left out.
const CPU_LIMIT: f64 = 2e11;

/// A group of this rank alone.
#[derive(Debug)]
pub struct Alone {
    group: ProcessGroup,
}

impl Alone {
    /// One rank on the GPU of this number.
    pub fn new(ordinal: usize) -> Result<Alone> {
        let comm = Comm::threads(1, Config::default())?.pop().context("no communicator of one rank")?;
        Ok(Alone { group: ProcessGroup::new(comm, BackendType::Tinynccl, Device::Ordinal(ordinal))? })
    }

    /// Trains with the whole batch on this rank's GPU.
    pub fn train(&self, kernels: &Kernels, options: &Options) -> Result<Outcome> {
        train(&self.group, kernels, options, Exchange::Overlapped, |_| ())
    }

    /// Trains with the whole batch on the CPU; `None` if that would take minutes.
    pub fn train_on_the_cpu(&self, options: &Options) -> Result<Option<Vec<Epoch>>> {
        if cpu_work(options) > CPU_LIMIT {
            return Ok(None);
        }
        let Training { epochs, batch, rate, seed, .. } = options.training;
        let data = Dataset::spiral(options.points, seed);
        let mut model = Mlp::new(&sizes(options), &mut Rng::new(seed));
        let mut optimizer = Optimizer::sgd(rate, &model.specs());
        let mut curve = Vec::with_capacity(epochs);
        for number in 1..=epochs {
            let (mut loss, mut correct, mut samples) = (0.0, 0, 0);
            for batch in epoch_order(data.len(), seed, number).chunks_exact(batch) {
                let (result, gradients) = cpu_gradients(&model, &data.select(batch));
                for (index, values) in model.params_mut().into_iter().enumerate() {
                    optimizer.update(index, values, &gradients[index]);
                }
                loss += result.loss * batch.len() as f64;
                correct += result.correct;
                samples += batch.len();
            }
            let weights = proof::prove_identical(self.group.comm(), &model.specs(), &model.params())?;
            let (loss, accuracy) = (loss / samples as f64, correct as f64 / samples as f64);
            curve.push(Epoch { number, loss, accuracy, weights });
        }
        Ok(Some(curve))
    }

    /// Compares the gradients of the first batch, here and on the CPU: the largest difference, relative to the largest
    /// gradient of the same parameter.
    pub fn gradient_difference(&self, kernels: &Kernels, options: &Options) -> Result<f64> {
        let data = Dataset::spiral(options.points, options.training.seed);
        let batch = data.select(&epoch_order(data.len(), options.training.seed, 1)[..options.training.batch]);
        let model = Mlp::new(&sizes(options), &mut Rng::new(options.training.seed));
        self.gradients_of(kernels, &model, &sizes(options), &batch, options.bucket_bytes)
    }

    /// [`Alone::gradient_difference`] of any model (whose layers have the widths `sizes`) and batch.
    pub fn gradients_of(
        &self,
        kernels: &Kernels,
        model: &Mlp,
        sizes: &[usize],
        batch: &Dataset,
        bucket_bytes: usize,
    ) -> Result<f64> {
        let how = Exchange::Overlapped;
        let mut replica = Replica::new(&self.group, kernels, model, sizes, batch.len(), bucket_bytes, how)?;
        let mut share = Share::new(replica.compute(), batch)?;
        let ours = replica.gradients(&mut share.batch(0, batch.len()))?;
        let (_, expected) = cpu_gradients(model, batch);
        ensure!(ours.len() == expected.len(), "{} gradients, expected {}", ours.len(), expected.len());
        let worst = ours.iter().zip(&expected).map(|(ours, expected)| share_of_largest(ours, expected));
        Ok(worst.fold(0.0, f64::max))
    }
}

/// Loss and gradients of a batch, on the CPU.
fn cpu_gradients(model: &Mlp, batch: &Dataset) -> (Classified, Vec<Vec<f32>>) {
    let mut trace = Trace::default();
    let outputs = model.forward(&batch.points, batch.len(), &mut trace);
    let mut d = vec![0.0; outputs.len()];
    let result = cross_entropy(outputs, &batch.labels, &mut d);
    let mut gradients: Vec<Vec<f32>> = model.specs().iter().map(|spec| vec![0.0; spec.len]).collect();
    let Ok(()) = model.backward(&trace, &d, &mut gradients);
    (result, gradients)
}

/// The largest difference between two vectors, relative to the largest magnitude in `expected`. NaN counts as infinite.
fn share_of_largest(got: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().fold(f64::MIN_POSITIVE, |m, e| m.max(f64::from(e.abs())));
    got.iter().zip(expected).fold(0.0, |worst, (g, e)| {
        let difference = (f64::from(*g) - f64::from(*e)).abs() / largest;
        if difference.is_nan() { f64::INFINITY } else { worst.max(difference) }
    })
}

/// The largest relative difference between two curves' losses.
pub fn loss_difference(got: &[Epoch], expected: &[Epoch]) -> f64 {
    let differences = got.iter().zip(expected).map(|(g, e)| ((g.loss - e.loss) / e.loss).abs());
    differences.fold(0.0, f64::max)
}

/// Multiplications and additions of the whole training: 6 per weight and sample.
fn cpu_work(options: &Options) -> f64 {
    let weights: usize = sizes(options).windows(2).map(|pair| pair[0] * pair[1]).sum();
    let samples = 3 * options.points / options.training.batch * options.training.batch;
    6.0 * weights as f64 * (samples * options.training.epochs) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative_to_the_largest() {
        assert_eq!(share_of_largest(&[1.0, -4.0], &[1.0, -4.0]), 0.0);
        assert_eq!(share_of_largest(&[1.0, -3.0], &[1.0, -4.0]), 0.25);
        assert_eq!(share_of_largest(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert!(share_of_largest(&[0.1], &[0.0]) > 1.0);
    }

    #[test]
    fn curves_are_compared_epoch_by_epoch() {
        let epoch = |loss| Epoch { number: 1, loss, accuracy: 0.0, weights: 0 };
        let (a, b) = ([epoch(2.0), epoch(1.0)], [epoch(2.0), epoch(0.8)]);
        assert_eq!(loss_difference(&a, &a), 0.0);
        approx::assert_abs_diff_eq!(loss_difference(&a, &b), 0.25, epsilon = 1e-12);
    }

    #[test]
    fn the_default_is_little_work_and_a_wide_model_much() {
        let work = |hidden| {
            let training = Training { epochs: 60, batch: 96, rate: 0.1, hidden, seed: 1 };
            cpu_work(&Options { training, points: 128, bucket_bytes: 8192 })
        };
        assert!(work(64) < CPU_LIMIT && work(4096) > CPU_LIMIT);
    }

    #[test]
    fn the_reference_learns() {
        // The CPU's gradients, the reference, must be right too: one step along them lowers the loss.
        let data = Dataset::spiral(20, 3);
        let mut model = Mlp::new(&[2, 9, 5, 3], &mut Rng::new(3));
        let (before, gradients) = cpu_gradients(&model, &data);
        for (values, gradient) in model.params_mut().into_iter().zip(&gradients) {
            values.iter_mut().zip(gradient).for_each(|(p, g)| *p -= 0.1 * g);
        }
        assert!(cpu_gradients(&model, &data).0.loss < before.loss);
    }
}
