//! LayerNorm without bias (Ba et al. 2016): each row to mean 0 and variance 1, times a weight per channel.

use super::parallel::{PerThread, Rows, Threads};
use super::profile::{Class, time};
use super::simd::{self, simd_fn};

const EPSILON: f32 = 1e-5;

simd_fn! {
    /// Returns the mean and 1 / standard deviation.
    fn row_forward(out: &mut [f32], x: &[f32], weight: &[f32]) -> (f32, f32) {
        let n = x.len();
        let (out, weight) = (&mut out[..n], &weight[..n]);
        let mean = simd::sum([x], |[x]| x) / n as f32;
        let variance = simd::sum([x], |[x]| (x - mean) * (x - mean)) / n as f32;
        let rstd = 1.0 / (variance + EPSILON).sqrt();
        for i in 0..n {
            out[i] = (x[i] - mean) * rstd * weight[i];
        }
        (mean, rstd)
    }
}

simd_fn! {
    fn row_backward(dx: &mut [f32], dweight: &mut [f32], dy: &[f32], x: &[f32], weight: &[f32], mean: f32, rstd: f32) {
        let n = x.len();
        let (dx, dweight, dy, weight) = (&mut dx[..n], &mut dweight[..n], &dy[..n], &weight[..n]);
        let sum = simd::sum([dy, weight], |[dy, w]| dy * w) / n as f32;
        let dot = simd::sum([dy, weight, x], |[dy, w, x]| dy * w * ((x - mean) * rstd)) / n as f32;
        for i in 0..n {
            let xhat = (x[i] - mean) * rstd;
            dweight[i] += dy[i] * xhat;
            dx[i] += rstd * (dy[i] * weight[i] - sum - xhat * dot);
        }
    }
}

/// The output of a LayerNorm, and what its backward pass needs beside the input.
pub struct Norm {
    /// The rows, normalised.
    pub out: Vec<f32>,
    /// Mean and 1 / standard deviation of each row.
    stats: Vec<f32>,
}

impl Norm {
    /// Room for `rows` of `channels`.
    pub fn new(rows: usize, channels: usize) -> Norm {
        Norm { out: vec![0.0; rows * channels], stats: vec![0.0; rows * 2] }
    }

    /// Normalises the rows of `x`.
    pub fn forward(&mut self, x: &[f32], weight: &[f32], threads: Threads) {
        let c = weight.len();
        let work = |first, (Rows(out, _), Rows(stats, _)): (Rows<'_>, Rows<'_>)| {
            for (i, (out, stats)) in out.chunks_mut(c).zip(stats.chunks_mut(2)).enumerate() {
                let (mean, rstd) = row_forward(out, &x[(first + i) * c..][..c], weight);
                stats.copy_from_slice(&[mean, rstd]);
            }
        };
        let parts = (Rows(&mut self.out, c), Rows(&mut self.stats, 2));
        time(Class::LayerNorm, 1, || threads.rows(x.len() / c, parts, work));
    }

    /// `dx +=` the gradient with respect to x; `dweight =` the one with respect to the weight.
    /// `partial` is scratch of one `dweight` per thread.
    pub fn backward(
        &self,
        dx: &mut [f32],
        dweight: &mut [f32],
        partial: &mut [f32],
        dy: &[f32],
        (x, weight): (&[f32], &[f32]),
        threads: Threads,
    ) {
        let c = weight.len();
        time(Class::LayerNorm, 1, || {
            let partial = &mut partial[..threads.count() * c];
            partial.fill(0.0);
            let parts = (Rows(dx, c), PerThread(partial, c));
            threads.rows(x.len() / c, parts, |first, (Rows(dx, _), PerThread(partial, _))| {
                for (i, dx) in dx.chunks_mut(c).enumerate() {
                    let row = first + i;
                    let (dy, x, stats) = (&dy[row * c..][..c], &x[row * c..][..c], &self.stats[2 * row..]);
                    row_backward(dx, partial, dy, x, weight, stats[0], stats[1]);
                }
            });
            dweight.fill(0.0);
            for part in partial.chunks(c) {
                for (sum, &v) in dweight.iter_mut().zip(part) {
                    *sum += v;
                }
            }
        });
    }
}
