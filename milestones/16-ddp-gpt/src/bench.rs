//! How fast a training step is, against the fastest that `gemm` multiplies here.

use std::time::Instant;

use anyhow::Result;

use crate::adamw::AdamW;
use crate::config::Preset;
use crate::data::{Batch, Corpus, Split};
use crate::gradients::LocalGradients;
use crate::model::{Model, Workspace};
use crate::ops::dropout::Dropout;
use crate::ops::matmul::{Mat, MatMut, matmul};
use crate::ops::parallel::Threads;
use crate::profile::Class;

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// GFLOP/s of a 1024³ product: the best of several.
    pub peak: f64,
    /// GFLOP/s of all matrix products within the steps.
    pub matmul: f64,
    /// Seconds of a step.
    pub step: f64,
    /// Characters per second.
    pub tokens_per_second: f64,
    /// Class, seconds per step, GFLOP/s where it multiplies matrices.
    pub classes: Vec<(Class, f64, f64)>,
}

/// GFLOP/s of `gemm` for a 1024³ product on this rank's threads, the best of `rounds`.
pub fn gemm_peak(threads: Threads, rounds: usize) -> f64 {
    let n = 1024;
    let (a, b, mut c) = (vec![0.5f32; n * n], vec![0.25f32; n * n], vec![0.0f32; n * n]);
    let mut best = 0.0f64;
    for _ in 0..rounds {
        let start = Instant::now();
        let flops = matmul(MatMut::new(&mut c, n, n), Mat::new(&a, n, n), Mat::new(&b, n, n), 1.0, false, threads);
        best = best.max(flops as f64 / start.elapsed().as_secs_f64() * 1e-9);
    }
    best
}

/// Times `steps` training steps of a preset on one rank, after one that warms up.
pub fn run(preset: Preset, batch: usize, steps: usize, threads: Threads, corpus: &Corpus) -> Result<Measured> {
    let peak = gemm_peak(threads, 12);
    let config = crate::config::TrainConfig { batch, ..preset.train() };
    let shape = preset.model(corpus.tokenizer.len());
    corpus.check_length(shape.context)?;
    let mut model = Model::new(shape, config.seed);
    let mut adamw = AdamW::new(model.values.len());
    let mut gradients = LocalGradients::new(&model.layout);
    let mut batch = Batch::new(config.batch, shape.context, 0, 1)?;
    let mut workspace = Workspace::new(&shape, batch.samples(), shape.context, true, threads);
    let mut start = Instant::now();
    for step in 0..=steps {
        if step == 1 {
            workspace.profile.reset();
            start = Instant::now();
        }
        batch.fill(corpus, Split::Train, config.seed, step);
        let dropout = Dropout::new(config.dropout, config.seed, step, 0);
        workspace.forward(&model, &batch.inputs, &dropout);
        workspace.cross_entropy(&batch.targets, true);
        workspace.backward(&model, &batch.inputs, &dropout, &mut gradients)?;
        let mut done = Ok(0.0);
        workspace.profile.time(Class::Optimizer, 1, || {
            done = adamw.step(&mut model.values, &model.layout, &mut gradients, &config, config.lr, threads);
            0
        });
        done?;
    }
    let step = start.elapsed().as_secs_f64() / steps as f64;
    let (mut seconds, mut flops) = (0.0, 0.0);
    let classes = Class::ALL.map(|class| {
        let (s, f) = workspace.profile.get(class);
        if f > 0 {
            seconds += s;
            flops += f as f64;
        }
        (class, s / steps as f64, if f > 0 { f as f64 / s * 1e-9 } else { 0.0 })
    });
    Ok(Measured {
        peak,
        matmul: flops / seconds * 1e-9,
        step,
        tokens_per_second: (config.batch * shape.context) as f64 / step,
        classes: classes.to_vec(),
    })
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = self.step * 1e3;
        writeln!(f, "gemm 1024x1024x1024          {:8.1} GFLOP/s", self.peak)?;
        writeln!(
            f,
            "matrix products in a step    {:8.1} GFLOP/s = {:.0} % of it",
            self.matmul,
            100.0 * self.matmul / self.peak
        )?;
        writeln!(f, "step                         {ms:8.2} ms, {:.0} tokens/s", self.tokens_per_second)?;
        let mut rest = ms;
        for &(class, seconds, gflops) in &self.classes {
            let own = seconds * 1e3;
            rest -= own;
            write!(f, "  {:<26} {own:8.2} ms {:5.1} %", class.name(), 100.0 * own / ms)?;
            if gflops > 0.0 { writeln!(f, " {gflops:8.1} GFLOP/s")? } else { writeln!(f)? }
        }
        write!(f, "  {:<26} {rest:8.2} ms {:5.1} %", "the rest", 100.0 * rest / ms)
    }
}
