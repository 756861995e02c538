//! Softmax cross entropy over the vocabulary.

use super::parallel::{PerThread, Rows, Threads};
use super::profile::{Class, time};
use super::simd::{self, simd_fn};

simd_fn! {
    /// Returns -ln p(target); with `scale` the row becomes (p - onehot) * scale.
    fn row(logits: &mut [f32], target: usize, scale: Option<f32>) -> f32 {
        let max = simd::max(logits);
        let wanted = logits[target];
        let total = match scale {
            None => simd::sum([logits], |[v]| simd::exp(v - max)),
            Some(scale) => {
                for v in logits.iter_mut() {
                    *v = simd::exp(*v - max);
                }
                let total = simd::sum([logits], |[v]| v);
                for v in logits.iter_mut() {
                    *v *= scale / total;
                }
                logits[target] -= scale;
                total
            }
        };
        total.ln() - (wanted - max)
    }
}

/// Mean loss in nats over the rows of `logits`; with `gradient`, `logits` become the gradient of that mean.
/// `partial` is scratch: two values per thread.
pub fn cross_entropy(
    logits: &mut [f32],
    targets: &[u32],
    vocab: usize,
    gradient: bool,
    partial: &mut [f32],
    threads: Threads,
) -> f64 {
    let rows = targets.len();
    let scale = gradient.then_some(1.0 / rows as f32);
    let partial = &mut partial[..2 * threads.count()];
    partial.fill(0.0);
    let parts = (Rows(&mut *logits, vocab), PerThread(&mut *partial, 2));
    let work = |first, (Rows(logits, _), PerThread(partial, _)): (Rows<'_>, PerThread<'_>)| {
        let mut sum = 0.0f64;
        for (i, logits) in logits.chunks_mut(vocab).enumerate() {
            sum += f64::from(row(logits, targets[first + i] as usize, scale));
        }
        // An f64 as the sum of two f32, since scratch is f32.
        partial[0] = sum as f32;
        partial[1] = (sum - f64::from(partial[0])) as f32;
    };
    time(Class::Loss, 1, || threads.rows(rows, parts, work));
    partial.iter().map(|&v| f64::from(v)).sum::<f64>() / rows as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_give_ln_vocabulary_and_gradients_sum_to_zero() {
        let (vocab, rows) = (65, 4);
        let mut logits = vec![0.25; vocab * rows];
        let targets = [0, 3, 64, 7];
        let mut partial = [0.0; 4];
        let loss = cross_entropy(&mut logits.clone(), &targets, vocab, false, &mut partial, Threads::new(2));
        approx::assert_abs_diff_eq!(loss, 65f64.ln(), epsilon = 1e-6);
        let with = cross_entropy(&mut logits, &targets, vocab, true, &mut partial, Threads::new(1));
        approx::assert_abs_diff_eq!(loss, with, epsilon = 1e-6);
        for (row, &t) in logits.chunks(vocab).zip(&targets) {
            approx::assert_abs_diff_eq!(row.iter().sum::<f32>(), 0.0, epsilon = 1e-6);
            approx::assert_abs_diff_eq!(row[t as usize], (1.0 / 65.0 - 1.0) / 4.0, epsilon = 1e-6);
        }
    }
}
