//! Speed of a training step, by kind of work, against the fastest that `gemm` multiplies here.

use std::time::Instant;

use anyhow::Result;
use clap::Args;

use super::adamw::AdamW;
use super::gradients::LocalGradients;
use super::matmul::{Mat, MatMut, matmul};
use super::model::Workspace;
use super::parallel::Threads;
use super::profile;
use crate::cli::{default_threads, positive};
use crate::config::{Preset, TrainConfig};
use crate::data::{Batch, Corpus, Split};
use crate::dropout::Dropout;
use crate::params::Model;

/// Options of `bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Sizes.
    #[arg(long, value_enum, default_value = "small")]
    pub preset: Preset,
    /// Sequences per step; the preset's own when absent.
    #[arg(long, value_parser = positive)]
    pub batch: Option<usize>,
    /// Steps to time.
    #[arg(long, default_value = "20", value_parser = positive)]
    pub steps: usize,
}

/// GFLOP/s of `gemm` for a 1024³ product on this rank's threads, the best of several.
fn gemm_peak(threads: Threads) -> f64 {
    let n = 1024;
    let (a, b, mut c) = (vec![0.5f32; n * n], vec![0.25f32; n * n], vec![0.0f32; n * n]);
    let speeds = (0..12).map(|_| {
        let start = Instant::now();
        let flops = matmul(MatMut::new(&mut c, n, n), Mat::new(&a, n, n), Mat::new(&b, n, n), 1.0, false, threads);
        flops as f64 / start.elapsed().as_secs_f64() * 1e-9
    });
    speeds.fold(0.0, f64::max)
}

/// Times training steps of a preset on one rank, after one that warms up, and prints where the time went.
pub fn run(args: &BenchArgs) -> Result<()> {
    let threads = Threads::new(default_threads(1));
    threads.install()?;
    let corpus = Corpus::find(None, &mut Vec::new())?;
    let preset = args.preset.train();
    let config = TrainConfig { batch: args.batch.unwrap_or(preset.batch), ..preset };
    println!("{} preset, batch {}, {} threads, {} steps", args.preset, config.batch, threads.count(), args.steps);
    let peak = gemm_peak(threads);
    let shape = args.preset.model(corpus.tokenizer.size());
    corpus.check_length(shape.context)?;
    let mut model = Model::new(shape, config.seed);
    let mut adamw = AdamW::new(model.values.len());
    let mut gradients = LocalGradients::new(&model.layout);
    let mut batch = Batch::new(config.batch, shape.context, 0, 1)?;
    let mut workspace = Workspace::new(&shape, batch.samples(), shape.context, true, threads);
    let mut start = Instant::now();
    for step in 0..=args.steps {
        if step == 1 {
            profile::take();
            start = Instant::now();
        }
        batch.fill(&corpus, Split::Train, config.seed, step);
        let dropout = Dropout::new(config.dropout, config.seed, step, 0);
        workspace.forward(&model, &batch.inputs, &dropout);
        workspace.cross_entropy(&batch.targets, true);
        workspace.backward(&model, &batch.inputs, &dropout, &mut gradients)?;
        adamw.step(&mut model, &mut gradients, &config, config.lr, threads)?;
    }
    let seconds = start.elapsed().as_secs_f64() / args.steps as f64;
    let spent = profile::take();

    let products = spent.iter().filter(|(_, flops)| *flops > 0);
    let (time, flops) = products.fold((0.0, 0), |(time, flops), &(s, f)| (time + s, flops + f));
    let matmul = flops as f64 / time * 1e-9;
    println!("gemm 1024x1024x1024          {peak:8.1} GFLOP/s");
    println!("matrix products in a step    {matmul:8.1} GFLOP/s = {:.0} % of it", 100.0 * matmul / peak);
    let tokens = (config.batch * shape.context) as f64 / seconds;
    println!("step                         {:8.2} ms, {tokens:.0} tokens/s", seconds * 1e3);
    let mut rest = seconds;
    for (name, (total, flops)) in profile::NAMES.iter().zip(spent) {
        let own = total / args.steps as f64;
        rest -= own;
        let speed = if flops > 0 { format!(" {:8.1} GFLOP/s", flops as f64 / total * 1e-9) } else { String::new() };
        println!("  {name:<26} {:8.2} ms {:5.1} %{speed}", own * 1e3, 100.0 * own / seconds);
    }
    println!("  {:<26} {:8.2} ms {:5.1} %", "the rest", rest * 1e3, 100.0 * rest / seconds);
    Ok(())
}
