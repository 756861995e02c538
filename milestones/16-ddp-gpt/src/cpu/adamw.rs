//! AdamW (Loshchilov and Hutter 2019) with the gradient clipped by its global norm first.

use anyhow::Result;

use super::gradients::Gradients;
use super::parallel::{Rows, Threads};
use super::profile::{Class, time};
use super::simd::{self, simd_fn};
use crate::config::TrainConfig;
use crate::params::Model;

/// The optimizer's state: running means of the gradients and of their squares.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// Mean of gradients, in the layout of the parameters.
    pub mean: Vec<f32>,
    /// Mean of squared gradients.
    pub square: Vec<f32>,
    /// Updates done; the bias correction depends on it.
    pub updates: usize,
}

/// Factors that change from update to update.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// lr / (1 - beta1^t).
    pub rate: f32,
    /// 1 / (1 - beta2^t).
    pub correction: f32,
    /// Factor on parameters that decay: 1 - lr · decay.
    pub keep: f32,
}

impl Rates {
    /// Returns the factors of update number `t`, counted from 1.
    pub fn new(config: &TrainConfig, lr: f64, t: usize) -> Rates {
        let t = t as f64;
        Rates {
            rate: (lr / (1.0 - config.beta1.powf(t))) as f32,
            correction: (1.0 / (1.0 - config.beta2.powf(t))) as f32,
            keep: (1.0 - lr * config.weight_decay) as f32,
        }
    }
}

/// The numbers of one update of one tensor.
#[derive(Debug, Clone, Copy)]
struct Update {
    /// Factor on the gradient, from clipping.
    clip: f32,
    /// Factor on the parameter.
    keep: f32,
    beta1: f32,
    beta2: f32,
    rate: f32,
    correction: f32,
}

const EPSILON: f32 = 1e-8;

simd_fn! {
    // EXERCISE 4 (How it works): AdamW on one slice: clip the gradient, move both means, decay the parameter, and
    // step along the corrected mean over the root of the corrected square.
    fn update(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], u: Update) {
        let n = p.len();
        let (m, v, g) = (&mut m[..n], &mut v[..n], &g[..n]);
        for i in 0..n {
            let g = g[i] * u.clip;
            m[i] = u.beta1 * m[i] + (1.0 - u.beta1) * g;
            v[i] = u.beta2 * v[i] + (1.0 - u.beta2) * g * g;
            p[i] = p[i] * u.keep - u.rate * m[i] / ((v[i] * u.correction).sqrt() + EPSILON);
        }
    }
}

impl AdamW {
    /// State for `count` parameters.
    pub fn new(count: usize) -> Self {
        AdamW { mean: vec![0.0; count], square: vec![0.0; count], updates: 0 }
    }

    /// Clips and applies the averaged gradients. Returns the gradient's norm before clipping.
    pub fn step(
        &mut self,
        model: &mut Model,
        gradients: &mut dyn Gradients,
        config: &TrainConfig,
        lr: f64,
        threads: Threads,
    ) -> Result<f64> {
        time(Class::Optimizer, 1, || {
            let mut squares = 0.0;
            for i in 0..model.layout.len() {
                squares += simd::sum_of_squares(gradients.gradient_mut(i)?);
            }
            let norm = squares.sqrt();
            self.updates += 1;
            let Rates { rate, correction, keep } = Rates::new(config, lr, self.updates);
            let clip = if norm > config.clip { (config.clip / norm) as f32 } else { 1.0 };
            let (beta1, beta2) = (config.beta1 as f32, config.beta2 as f32);
            for (i, info) in model.layout.iter().enumerate() {
                let keep = if info.decays() { keep } else { 1.0 };
                let u = Update { clip, keep, beta1, beta2, rate, correction };
                let g: &[f32] = gradients.gradient_mut(i)?;
                let [p, m, v] =
                    [&mut model.values, &mut self.mean, &mut self.square].map(|all| Rows(&mut all[info.range()], 1));
                threads.rows(info.len, (p, (m, v)), |first, (Rows(p, _), (Rows(m, _), Rows(v, _)))| {
                    update(p, m, v, &g[first..], u);
                });
            }
            Ok(norm)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ModelConfig, Preset};
    use crate::cpu::gradients::LocalGradients;

    /// Two updates worked out in f64 from the paper's formulas, with clipping and without, with decay and without.
    #[test]
    fn agrees_with_the_formulas() {
        let shape = ModelConfig { vocab: 2, context: 2, layers: 1, heads: 1, channels: 2 };
        let mut model = Model::new(shape, 1);
        let (n, layout) = (model.values.len(), model.layout.clone());
        let config = TrainConfig { clip: 3.0, weight_decay: 0.5, ..Preset::Small.train() };
        model.values = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut want: Vec<f64> = model.values.iter().map(|&v| f64::from(v)).collect();
        let (mut m, mut v) = (vec![0.0f64; n], vec![0.0f64; n]);
        let mut adamw = AdamW::new(n);
        let mut gradients = LocalGradients::new(&layout);
        for (t, (scale, lr)) in [(1.0f32, 0.01), (0.1, 0.02)].into_iter().enumerate() {
            for (i, g) in gradients.values.iter_mut().enumerate() {
                *g = scale * (i as f32 * 0.73).cos();
            }
            let g: Vec<f64> = gradients.values.iter().map(|&g| f64::from(g)).collect();
            let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert_eq!(norm > config.clip, t == 0, "the test wants one clipped update and one not: {norm}");
            let clip = (config.clip / norm).min(1.0);
            for info in &layout {
                for i in info.range() {
                    let decay = if info.shape.len() == 2 { config.weight_decay } else { 0.0 };
                    want[i] -= lr * decay * want[i];
                    m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g[i] * clip;
                    v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * (g[i] * clip).powi(2);
                    let mhat = m[i] / (1.0 - config.beta1.powi(t as i32 + 1));
                    let vhat = v[i] / (1.0 - config.beta2.powi(t as i32 + 1));
                    want[i] -= lr * mhat / (vhat.sqrt() + 1e-8);
                }
            }
            let got = adamw.step(&mut model, &mut gradients, &config, lr, Threads::new(1)).unwrap();
            approx::assert_abs_diff_eq!(got, norm, epsilon = 1e-5);
            for (&got, &want) in model.values.iter().zip(&want) {
                approx::assert_abs_diff_eq!(f64::from(got), want, epsilon = 2e-6);
            }
        }
    }
}
