//! Sizes of the model, settings of a training run, and the presets that fix both.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Shape of the network. Two models with equal shapes have the same parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Distinct characters.
    pub vocab: usize,
    /// Longest sequence, in characters.
    pub context: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Attention heads; divides `channels`.
    pub heads: usize,
    /// Width of the residual stream.
    pub channels: usize,
}

impl ModelConfig {
    /// Channels of one head.
    pub fn head_dim(&self) -> usize {
        self.channels / self.heads
    }
}

impl fmt::Display for ModelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelConfig { vocab, context, layers, heads, channels } = self;
        write!(f, "{layers} layers, {heads} heads, {channels} channels, context {context}, vocabulary {vocab}")
    }
}

/// Settings that, with the model's shape and the text, determine every loss of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// Optimizer steps in the whole run; the learning-rate schedule ends there.
    pub steps: usize,
    /// Sequences per step over all ranks.
    pub batch: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end of the cosine.
    pub min_lr: f64,
    /// Steps of linear warm-up.
    pub warmup: usize,
    /// AdamW: decay of the mean of gradients.
    pub beta1: f64,
    /// AdamW: decay of the mean of squared gradients.
    pub beta2: f64,
    /// AdamW: weight decay of matrices (not of LayerNorm weights).
    pub weight_decay: f64,
    /// Largest norm of the whole gradient; larger ones are scaled down to it.
    pub clip: f64,
    /// Probability with which dropout zeroes an activation.
    pub dropout: f64,
    /// Source of all randomness.
    pub seed: u64,
    /// Local steps between averages of parameters; `None`: gradients are averaged in every step.
    #[serde(default)]
    pub outer: Option<OuterConfig>,
}

/// Settings of training with local steps, and of the outer optimizer that averages them (DiLoCo).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OuterConfig {
    /// Steps that a rank takes by itself between two outer steps.
    pub local_steps: usize,
    /// Outer learning rate.
    pub lr: f64,
    /// Nesterov momentum of the outer steps.
    pub momentum: f64,
}

impl TrainConfig {
    /// Steps from one call for all ranks to the next.
    pub fn round(&self) -> usize {
        self.outer.map_or(1, |outer| outer.local_steps)
    }

    /// Learning rate of a step, counted from 0: linear warm-up, then half a cosine down to the minimum (Loshchilov and
    /// Hutter 2017).
    pub fn learning_rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let length = self.steps.saturating_sub(self.warmup).max(1);
        let progress = ((step - self.warmup) as f64 / length as f64).min(1.0);
        let min = self.min_lr.min(self.lr);
        min + 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()) * (self.lr - min)
    }
}

/// Named sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// For tests; takes seconds.
    Tiny,
    /// Learns visibly on two CPU cores in about two minutes.
    Small,
    /// 10.7 million parameters, nanoGPT's shakespeare_char; hours on CPUs.
    Full,
}

impl Preset {
    /// Shape of the preset for a vocabulary.
    pub fn model(self, vocab: usize) -> ModelConfig {
        let (context, layers, heads, channels) = match self {
            Preset::Tiny => (16, 2, 2, 16),
            Preset::Small => (64, 4, 4, 128),
            Preset::Full => (256, 6, 6, 384),
        };
        ModelConfig { vocab, context, layers, heads, channels }
    }

    /// Training settings of the preset.
    pub fn train(self) -> TrainConfig {
        let base = TrainConfig {
            steps: 5000,
            batch: 64,
            lr: 1e-3,
            min_lr: 1e-4,
            warmup: 100,
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.1,
            clip: 1.0,
            dropout: 0.2,
            seed: 1337,
            outer: None,
        };
        match self {
            Preset::Tiny => {
                TrainConfig { steps: 60, batch: 12, lr: 1e-2, min_lr: 1e-3, warmup: 5, dropout: 0.0, ..base }
            }
            Preset::Small => TrainConfig { steps: 1000, batch: 24, lr: 3e-3, min_lr: 3e-4, dropout: 0.0, ..base },
            Preset::Full => base,
        }
    }

    /// Steps between evaluations.
    pub fn eval_every(self) -> usize {
        match self {
            Preset::Tiny => 20,
            Preset::Small => 100,
            Preset::Full => 250,
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_then_falls_to_the_minimum() {
        let config = Preset::Full.train();
        let lr = |s| config.learning_rate(s);
        assert!((0..config.warmup).all(|s| lr(s) < lr(s + 1)));
        assert!((config.warmup..config.steps).all(|s| lr(s) >= lr(s + 1)));
        assert_eq!(lr(config.warmup), config.lr);
        approx::assert_abs_diff_eq!(lr(config.steps), config.min_lr, epsilon = 1e-12);
    }
}
