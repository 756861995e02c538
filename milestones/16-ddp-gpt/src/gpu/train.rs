//! The training loop on a GPU: as [`crate::train`], but steps are enqueued without waiting, and losses are read only where somebody
//! wants to see them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::Precision;
use super::device::Gpu;
use super::network::Network;
use super::reducer::Reducer;
use super::step::Training;
use crate::checkpoint::Point;
use crate::data::{Batch, Corpus};
use crate::gradients::{Ranks, agree};
use crate::model::Model;
use crate::ops::dropout::Dropout;
use crate::report::{Report, Step};
use crate::sample::{Sampling, sample_with};
use crate::schedule::learning_rate;
use crate::train::{Plan, State, Summary, save};

/// What a GPU run has beside a [`Plan`].
#[derive(Debug, Clone)]
pub struct GpuPlan {
    /// Type of products.
    pub precision: Precision,
    /// Whether each step is one graph.
    pub graph: bool,
    /// Gradients are averaged in buckets of at least so many bytes.
    pub bucket_bytes: usize,
    /// Steps between reports.
    pub log_every: usize,
    /// Where the last step's trace goes.
    pub trace: Option<PathBuf>,
    /// Characters of the sample at the end; 0: none.
    pub sample_chars: usize,
}

/// Trains until `plan.config.steps` steps are done, as [`crate::train::train`] does; also gives the sample that rank 0 drew.
#[expect(clippy::too_many_arguments, reason = "the same as the CPU's, and the GPU")]
pub fn train(
    plan: &Plan,
    how: &GpuPlan,
    gpu: Gpu,
    state: &mut State,
    corpus: &Corpus,
    ranks: &mut dyn Ranks,
    reducer: &dyn Reducer,
    sampling: &Sampling,
    report: &mut dyn Report,
) -> Result<(Summary, Option<String>)> {
    let started = Instant::now();
    let (config, shape) = (plan.config, state.model.config);
    corpus.check_length(shape.context)?;
    agree(ranks, "the text", corpus.crc)?;
    agree(ranks, "the checkpoint", state.crc())?;
    agree(ranks, "the number of steps already done", state.step as u32)?;

    let batch = Batch::new(config.batch, shape.context, ranks.rank(), ranks.size())?;
    let dropout = Dropout::new(config.dropout, config.seed, 0, 0);
    let name = gpu.describe();
    let network = Network::new(gpu, shape, batch.samples(), how.precision, dropout)?;
    let mut training = Training::new(
        network,
        reducer,
        config,
        &state.model.values,
        &state.adamw,
        corpus,
        batch.first,
        plan.eval_batches,
        how.bucket_bytes,
    )?;
    report.note(&format!(
        "{name}: {:?} products, {} buckets, ready after {:.1} s",
        how.precision,
        training.buckets(),
        started.elapsed().as_secs_f64()
    ));
    if how.trace.is_some() {
        training.start_trace()?;
    }

    let tokens_per_step = (config.batch * shape.context) as f64;
    let mut pace = Pace::default();
    let begun = state.step;
    while state.step < config.steps {
        let from = state.step;
        let mut validation = None;
        if from.is_multiple_of(plan.eval_every) {
            let loss = evaluate(plan, &mut training, ranks)?;
            report.evaluated(from, loss);
            validation = Some(loss);
        }
        // The first step runs alone: it loads kernels, which a graph needs loaded and no clock should see.
        let mut to = if from == begun { from + 1 } else { config.steps };
        for every in [plan.eval_every, plan.checkpoint_every, how.log_every] {
            if every > 0 {
                to = to.min((from + 1).next_multiple_of(every));
            }
        }
        let start = Instant::now();
        for _ in from..to {
            training.step()?;
        }
        let mut losses = training.losses(from, to)?;
        if from == begun {
            pace.before = training.waited_seconds()?;
            if how.graph && reducer.captures() {
                training.capture()?;
            } else if how.graph {
                report.note(
                    "note: ranks share a GPU, and their averages cannot be captured: steps are launched one by one",
                );
            }
        } else {
            pace.add(start.elapsed(), to - from);
        }
        ranks.mean(&mut losses)?;
        let (seconds, communication) = pace.share(&training)?;
        for (i, &loss) in losses.iter().enumerate() {
            let step = from + i;
            if !loss.is_finite() {
                bail!("step {step}: the loss is {loss}; a lower --lr than {} may help", config.lr);
            }
            state.history.push(Point { step, train: Some(loss), validation: validation.take() });
            report.step(&Step {
                step,
                steps: config.steps,
                loss,
                lr: learning_rate(&config, step),
                tokens_per_second: pace.steps as f64 * tokens_per_step / seconds,
                communication,
            });
        }
        state.step = to;
        if plan.checkpoint_every > 0 && to.is_multiple_of(plan.checkpoint_every) && to < config.steps {
            fetch(&training, state)?;
            save(plan, state, corpus, ranks)?;
        }
    }
    let validation = evaluate(plan, &mut training, ranks)?;
    report.evaluated(state.step, validation);
    fetch(&training, state)?;
    save(plan, state, corpus, ranks)?;
    let train = state.history.last().and_then(|p| p.train);
    state.history.push(Point { step: state.step, train: None, validation: Some(validation) });
    if let Some(path) = &how.trace {
        let path = if ranks.size() > 1 { path.with_extension(format!("{}.json", ranks.rank())) } else { path.clone() };
        if let Some(overlap) = training.save_trace(ranks.rank(), &path)? {
            report.note(&format!("{}: {overlap}", path.display()));
        }
    }
    let (seconds, communication) = pace.share(&training)?;
    report.note(&format!(
        "{:.1} steps/s, {:.3} ms a step; median of {} stretches {:.1} steps/s",
        pace.steps as f64 / seconds,
        1e3 * seconds / pace.steps.max(1) as f64,
        pace.rates.len(),
        pace.median()
    ));
    let summary = Summary {
        train,
        validation,
        tokens_per_second: pace.steps as f64 * tokens_per_step / seconds,
        communication,
        elapsed: started.elapsed(),
    };
    let text = if ranks.rank() == 0 && how.sample_chars > 0 {
        Some(sample(&mut training.network, corpus, how.sample_chars, sampling)?)
    } else {
        None
    };
    Ok((summary, text))
}

/// Time and number of steps, without the first one and without evaluations.
#[derive(Debug, Default)]
struct Pace {
    spent: Duration,
    steps: usize,
    /// Steps per second from one report to the next.
    rates: Vec<f64>,
    /// Seconds waited for averages before.
    before: f64,
}

impl Pace {
    fn add(&mut self, spent: Duration, steps: usize) {
        self.spent += spent;
        self.steps += steps;
        self.rates.push(steps as f64 / spent.as_secs_f64().max(1e-9));
    }

    /// Of the rates; 0 without any.
    fn median(&self) -> f64 {
        let mut sorted = self.rates.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }

    /// Seconds, and the share of them that the passes waited for averages.
    fn share(&self, training: &Training<'_>) -> Result<(f64, f64)> {
        let seconds = self.spent.as_secs_f64().max(1e-9);
        let waited = if self.steps == 0 { 0.0 } else { training.waited_seconds()? - self.before };
        Ok((seconds, waited / seconds))
    }
}

/// The validation loss over all ranks.
fn evaluate(plan: &Plan, training: &mut Training<'_>, ranks: &mut dyn Ranks) -> Result<f64> {
    let mut mean = [training.evaluate(plan.eval_batches)?];
    ranks.mean(&mut mean)?;
    Ok(mean[0])
}

/// Parameters and optimizer from the GPU to the host.
fn fetch(training: &Training<'_>, state: &mut State) -> Result<()> {
    let Model { values, .. } = &mut state.model;
    [*values, state.adamw.mean, state.adamw.square] = training.download()?;
    state.adamw.updates = state.step;
    Ok(())
}

/// Text from the trained network, in the first sequence of its batch.
fn sample(network: &mut Network, corpus: &Corpus, chars: usize, how: &Sampling) -> Result<String> {
    let mut inputs = vec![0; network.rows()];
    let targets = inputs.clone();
    let context = network.config.context;
    sample_with(context, &corpus.tokenizer, "\n", chars, how, |window, last| {
        inputs[..context].copy_from_slice(window);
        network.set_batch(&inputs, &targets)?;
        network.forward(false)?;
        network.logits(last)
    })
}
