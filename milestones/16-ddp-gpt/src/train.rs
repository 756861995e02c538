//! The training loop: the same on every rank.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::adamw::AdamW;
use crate::checkpoint::{self, Checkpoint, Header, Point};
use crate::config::{ModelConfig, Preset, TrainConfig};
use crate::data::{Batch, Corpus, Split};
use crate::gradients::{Gradients, Ranks, agree};
use crate::model::{Model, Workspace};
use crate::ops::dropout::Dropout;
use crate::ops::parallel::Threads;
use crate::params;
use crate::report::{Report, Step};
use crate::schedule::learning_rate;

/// What to do, beside what the losses depend on.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Preset that the settings started from.
    pub preset: Preset,
    /// Settings.
    pub config: TrainConfig,
    /// Threads of each rank.
    pub threads: Threads,
    /// Steps between evaluations.
    pub eval_every: usize,
    /// Global batches per evaluation.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: usize,
    /// Where checkpoints go; none are written without it.
    pub checkpoint: Option<PathBuf>,
}

/// Everything that changes while training.
#[derive(Debug)]
pub struct State {
    /// The network.
    pub model: Model,
    /// The optimizer.
    pub adamw: AdamW,
    /// Steps done.
    pub step: usize,
    /// Losses so far.
    pub history: Vec<Point>,
    /// What ranks compare before they start: 0, or the checkpoint's checksum.
    crc: u32,
}

impl State {
    /// The start of a run.
    pub fn new(config: ModelConfig, seed: u64) -> Self {
        let model = Model::new(config, seed);
        let adamw = AdamW::new(model.values.len());
        State { model, adamw, step: 0, history: Vec::new(), crc: 0 }
    }

    /// The checksum of the checkpoint that it came from, else 0.
    pub fn crc(&self) -> u32 {
        self.crc
    }

    /// The middle of a run. The checkpoint must have passed [`Header::check`].
    pub fn resume(from: Checkpoint) -> Self {
        let Checkpoint { header, values, adamw, crc } = from;
        let layout = params::layout(&header.model);
        let model = Model { config: header.model, layout, values };
        State { model, adamw, step: header.step, history: header.history, crc }
    }
}

/// What a run came to.
#[derive(Debug, Clone, Copy)]
pub struct Summary {
    /// Loss of the last step's batch.
    pub train: Option<f64>,
    /// Last validation loss.
    pub validation: f64,
    /// Characters per second over all ranks.
    pub tokens_per_second: f64,
    /// Share of the steps' time spent waiting for communication.
    pub communication: f64,
    /// Wall time.
    pub elapsed: Duration,
}

/// Trains until `plan.config.steps` steps are done.
///
/// Every rank must come with the same plan, text and state. On rank 0 `report` should speak, elsewhere be silent.
/// Rank 0 writes the checkpoints.
pub fn train(
    plan: &Plan,
    state: &mut State,
    corpus: &Corpus,
    ranks: &mut dyn Ranks,
    gradients: &mut dyn Gradients,
    report: &mut dyn Report,
) -> Result<Summary> {
    let started = Instant::now();
    let (config, shape) = (plan.config, state.model.config);
    corpus.check_length(shape.context)?;
    agree(ranks, "the text", corpus.crc)?;
    agree(ranks, "the checkpoint", state.crc)?;
    agree(ranks, "the number of steps already done", state.step as u32)?;
    gradients.broadcast_parameters(&mut params::split_mut(&state.model.layout, &mut state.model.values))?;

    let mut batch = Batch::new(config.batch, shape.context, ranks.rank(), ranks.size())?;
    let mut workspace = Workspace::new(&shape, batch.samples(), shape.context, true, plan.threads);
    let tokens_per_step = (config.batch * shape.context) as f64;
    let (mut training, mut waiting, mut tokens) = (Duration::ZERO, Duration::ZERO, 0.0);

    for step in state.step..config.steps {
        let mut point = Point { step, train: None, validation: None };
        if step % plan.eval_every == 0 {
            let loss = evaluate(plan, &state.model, &mut workspace, &mut batch, corpus, ranks)?;
            report.evaluated(step, loss);
            point.validation = Some(loss);
        }
        let start = Instant::now();
        let lr = learning_rate(&config, step);
        batch.fill(corpus, Split::Train, config.seed, step);
        let dropout = Dropout::new(config.dropout, config.seed, step, batch.first);
        workspace.forward(&state.model, &batch.inputs, &dropout);
        let mut loss = [workspace.cross_entropy(&batch.targets, true)];
        workspace.backward(&state.model, &batch.inputs, &dropout, gradients)?;
        waiting += gradients.finish()?.exposed;
        let before = Instant::now();
        ranks.mean(&mut loss)?;
        waiting += before.elapsed();
        let [loss] = loss;
        if !loss.is_finite() {
            bail!("step {step}: the loss is {loss}; a lower --lr than {} may help", config.lr);
        }
        let model = &mut state.model;
        state.adamw.step(&mut model.values, &model.layout, gradients, &config, lr, plan.threads)?;
        training += start.elapsed();
        tokens += tokens_per_step;
        point.train = Some(loss);
        state.history.push(point);
        state.step = step + 1;
        report.step(&Step {
            step,
            steps: config.steps,
            loss,
            lr,
            tokens_per_second: tokens / training.as_secs_f64(),
            communication: waiting.as_secs_f64() / training.as_secs_f64(),
        });
        if plan.checkpoint_every > 0 && state.step.is_multiple_of(plan.checkpoint_every) && state.step < config.steps {
            save(plan, state, corpus, ranks)?;
        }
    }
    let validation = evaluate(plan, &state.model, &mut workspace, &mut batch, corpus, ranks)?;
    report.evaluated(state.step, validation);
    let train = state.history.last().and_then(|p| p.train);
    save(plan, state, corpus, ranks)?;
    state.history.push(Point { step: state.step, train: None, validation: Some(validation) });
    ranks.barrier()?;
    Ok(Summary {
        train,
        validation,
        tokens_per_second: if training.is_zero() { 0.0 } else { tokens / training.as_secs_f64() },
        communication: if training.is_zero() { 0.0 } else { waiting.as_secs_f64() / training.as_secs_f64() },
        elapsed: started.elapsed(),
    })
}

/// Mean loss over the same validation batches each time, shared out over the ranks.
fn evaluate(
    plan: &Plan,
    model: &Model,
    workspace: &mut Workspace,
    batch: &mut Batch,
    corpus: &Corpus,
    ranks: &mut dyn Ranks,
) -> Result<f64> {
    let mut sum = 0.0;
    for i in 0..plan.eval_batches {
        batch.fill(corpus, Split::Validation, plan.config.seed, i);
        workspace.forward(model, &batch.inputs, &Dropout::OFF);
        sum += workspace.cross_entropy(&batch.targets, false);
    }
    let mut mean = [sum / plan.eval_batches as f64];
    ranks.mean(&mut mean)?;
    Ok(mean[0])
}

/// Rank 0's checkpoint, where the plan wants one.
pub fn save(plan: &Plan, state: &State, corpus: &Corpus, ranks: &dyn Ranks) -> Result<()> {
    let Some(path) = plan.checkpoint.as_ref().filter(|_| ranks.rank() == 0) else { return Ok(()) };
    let header = Header {
        preset: plan.preset,
        model: state.model.config,
        train: plan.config,
        step: state.step,
        vocabulary: corpus.tokenizer.vocabulary(),
        values: state.model.values.len(),
        history: state.history.clone(),
    };
    checkpoint::save(path, &header, &state.model.values, &state.adamw)
}
