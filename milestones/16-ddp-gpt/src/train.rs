//! The training loop: the same on every rank, whatever computes the steps.

use std::path::PathBuf;

use anyhow::{Result, bail};
use tinynccl::{Comm, ReduceOp};

use crate::checkpoint::{self, Checkpoint, Header, Point};
use crate::config::{ModelConfig, Preset, TrainConfig};
use crate::cpu::adamw::AdamW;
use crate::cpu::local::Round;
use crate::cpu::outer::Outer;
use crate::cpu::parallel::Threads;
use crate::data::Corpus;
use crate::elastic;
use crate::params::{self, Model};
use crate::report::Report;

/// Hook before each call of [`Engine::steps`], on every rank, with the group and the number of the step. A lab kills
/// ranks in it.
pub type BeforeStep = fn(&Comm, usize) -> Result<()>;

/// Settings of a run: what the losses depend on (`model`, `config`), and how to compute them.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Preset that the settings started from.
    pub preset: Preset,
    /// Shape of the network.
    pub model: ModelConfig,
    /// Settings.
    pub config: TrainConfig,
    /// Threads of each rank.
    pub threads: Threads,
    /// Gradients are averaged in buckets of at least `bucket_bytes` bytes.
    pub bucket_bytes: usize,
    /// Steps between reports.
    pub log_every: usize,
    /// Steps between evaluations.
    pub eval_every: usize,
    /// Global batches per evaluation.
    pub eval_batches: usize,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: usize,
    /// Path of the checkpoints; `None`: none are written.
    pub checkpoint: Option<PathBuf>,
    /// Ranks that train, if spares may take the places of lost ones; 0: there are no spares.
    pub places: usize,
    /// Hook before each call of [`Engine::steps`].
    pub before_step: BeforeStep,
}

impl Plan {
    /// The step up to which an engine goes in one call from `step` on: to the next outer step, or, if it `queues`, to
    /// where something is to be reported, evaluated or saved.
    fn pause(&self, step: usize, queues: bool) -> usize {
        if !queues {
            return (step + 1).next_multiple_of(self.config.round()).min(self.config.steps);
        }
        let every = [self.log_every, self.eval_every, self.checkpoint_every].into_iter().filter(|&every| every > 0);
        every.map(|every| (step + 1).next_multiple_of(every)).fold(self.config.steps, usize::min)
    }

    /// Returns true if what happens `every` so many steps is due before `step`: at a multiple, or at the first outer
    /// step after it.
    fn due(&self, every: usize, step: usize) -> bool {
        every > 0 && step % every < self.config.round()
    }
}

/// Everything that changes while training.
#[derive(Debug, Clone)]
pub struct State {
    /// The network.
    pub model: Model,
    /// The optimizer. With local steps each rank has its own.
    pub adamw: AdamW,
    /// The outer optimizer of a run with local steps.
    pub outer: Option<Outer>,
    /// Local steps that no outer step has taken in yet.
    pub round: Option<Round>,
    /// Steps done.
    pub step: usize,
    /// Losses so far.
    pub history: Vec<Point>,
    /// Value that ranks compare before they start: 0, or the checkpoint's checksum.
    crc: u32,
}

impl State {
    /// The start of a run.
    pub fn new(model: ModelConfig, config: &TrainConfig) -> Self {
        let model = Model::new(model, config.seed);
        let count = model.values.len();
        let outer = config.outer.map(|_| Outer::new(count));
        State { model, adamw: AdamW::new(count), outer, round: None, step: 0, history: Vec::new(), crc: 0 }
    }

    /// The middle of a run, on rank `rank`. The checkpoint must have passed [`Header::check`].
    pub fn resume(from: Checkpoint, config: &TrainConfig, rank: usize) -> Self {
        let Checkpoint { header, values, mut adamw, momentum, crc } = from;
        let model = Model { config: header.model, layout: params::layout(&header.model), values };
        // Of another number of ranks, or of a run without local steps, a rank takes one that was another's: see
        // `elastic::equip`.
        let adamw = adamw.swap_remove(rank % adamw.len());
        let outer = momentum.map(|momentum| Outer { momentum });
        let outer = config.outer.map(|_| outer.unwrap_or_else(|| Outer::new(model.values.len())));
        State { model, adamw, outer, round: None, step: header.step, history: header.history, crc }
    }
}

/// Time of the steps so far, without evaluations.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Steps that were timed.
    pub steps: usize,
    /// Their time.
    pub seconds: f64,
    /// The part of it spent waiting for communication: what overlap could not hide.
    pub waited: f64,
}

impl Pace {
    /// Characters per second, and the share of the time spent waiting for communication.
    pub fn rates(&self, tokens_per_step: usize) -> (f64, f64) {
        let per_second = |amount: f64| if self.seconds > 0.0 { amount / self.seconds } else { 0.0 };
        (per_second((self.steps * tokens_per_step) as f64), per_second(self.waited))
    }
}

/// Computes the steps of one rank: [`crate::cpu::step`] or [`crate::gpu::step`].
pub trait Engine {
    /// Takes the parameters with which the run begins, the same on every rank.
    fn start(&mut self, _model: &Model, _report: &Report) -> Result<()> {
        Ok(())
    }

    /// Returns true if one call may request many steps, because the host only enqueues them.
    fn queues(&self) -> bool {
        false
    }

    /// Does the steps from `state.step` up to `to`. Gives their losses, each the mean over the global batch.
    fn steps(&mut self, state: &mut State, to: usize) -> Result<Vec<f64>>;

    /// The mean loss over this rank's part of the validation batches, the same ones each time.
    fn evaluate(&mut self, model: &Model) -> Result<f64>;

    /// Logits that follow the first `last + 1` of a context's tokens.
    fn logits(&mut self, model: &Model, tokens: &[u32], last: usize) -> Result<Vec<f32>>;

    /// Time of the steps so far.
    fn pace(&self) -> Result<Pace>;

    /// Brings parameters and optimizer in `state` up to date.
    fn fetch(&self, _state: &mut State) -> Result<()> {
        Ok(())
    }

    /// After the last step: reports whatever remains.
    fn finish(&self, _report: &Report) -> Result<()> {
        Ok(())
    }
}

/// Trains until `plan.config.steps` steps are done. Gives the last validation loss.
///
/// Every rank must come with the same plan, text and state; rank 0's parameters count. Ends with
/// [`elastic::SpareWaits`] before a step for which there is a spare and a place. On rank 0 `report` should speak,
/// elsewhere be silent. Rank 0 writes the checkpoints.
pub fn train(
    plan: &Plan,
    state: &mut State,
    corpus: &Corpus,
    comm: &Comm,
    engine: &mut dyn Engine,
    report: &Report,
) -> Result<f64> {
    let config = plan.config;
    agree(comm, "the text", corpus.crc)?;
    agree(comm, "the checkpoint", state.crc)?;
    agree(comm, "the number of steps already done", state.step as u32)?;
    comm.broadcast_in_place(&mut state.model.values, 0)?;
    engine.start(&state.model, report)?;
    // A death after the last step brings ranks here again, which then evaluate again.
    state.history.pop_if(|point| point.train.is_none());

    while state.step < config.steps {
        if comm.size() < plan.places && elastic::spares_wait(comm)? {
            bail!(elastic::SpareWaits);
        }
        let from = state.step;
        let mut validation = None;
        if plan.due(plan.eval_every, from) {
            validation = Some(evaluate(state, comm, engine, report)?);
        }
        let to = plan.pause(from, engine.queues());
        (plan.before_step)(comm, from)?;
        let losses = engine.steps(state, to)?;
        let (speed, communication) = engine.pace()?.rates(config.batch * plan.model.context);
        let (speed, share) = (speed / 1e3, 100.0 * communication);
        for (step, loss) in (from..to).zip(losses) {
            if !loss.is_finite() {
                bail!("step {step}: the loss is {loss}; a lower --lr than {} may help", config.lr);
            }
            state.history.push(Point { step, train: Some(loss), validation: validation.take() });
            let lr = config.learning_rate(step);
            let pace = format!("{speed:.1}k tokens/s  communication {share:.1} %");
            report.step(step, &format!("loss {loss:.4}"), &format!("lr {lr:.2e}"), &pace);
        }
        state.step = to;
        if plan.due(plan.checkpoint_every, to) && to < config.steps {
            save(plan, state, corpus, comm, engine)?;
        }
    }
    let validation = evaluate(state, comm, engine, report)?;
    save(plan, state, corpus, comm, engine)?;
    state.history.push(Point { step: state.step, train: None, validation: Some(validation) });
    engine.finish(report)?;
    Ok(validation)
}

/// Fails on at least one rank when `value` is not the same on all; `what` says what it stands for.
pub fn agree(comm: &Comm, what: &str, value: u32) -> Result<()> {
    let mut mean = [f64::from(value)];
    comm.all_reduce_in_place(&mut mean, ReduceOp::Avg)?;
    if (mean[0] - f64::from(value)).abs() > 1e-3 {
        bail!("rank {}: {what} is not the same as on the other ranks; every rank must be given the same", comm.rank());
    }
    Ok(())
}

/// The validation loss over all ranks.
fn evaluate(state: &State, comm: &Comm, engine: &mut dyn Engine, report: &Report) -> Result<f64> {
    let mut mean = [engine.evaluate(&state.model)?];
    comm.all_reduce_in_place(&mut mean, ReduceOp::Avg)?;
    report.note(&format!("step {:>5}  validation loss {:.4}", state.step, mean[0]));
    Ok(mean[0])
}

/// Brings the state up to date, and writes rank 0's checkpoint where the plan wants one.
fn save(plan: &Plan, state: &mut State, corpus: &Corpus, comm: &Comm, engine: &dyn Engine) -> Result<()> {
    engine.fetch(state)?;
    let AdamW { mean, square, .. } = &state.adamw;
    let (mut arrays, mut optimizers) = (vec![&state.model.values, mean, square], 1);
    let mut all = Vec::new();
    if let (Some(Outer { momentum }), Some(_)) = (&state.outer, &plan.checkpoint) {
        let moments = [&mean[..], square].concat();
        all.resize(if comm.rank() == 0 { moments.len() * comm.size() } else { 0 }, 0.0);
        comm.gather(&moments, &mut all, 0)?;
        (arrays, optimizers) = (vec![&state.model.values, &all, momentum], comm.size());
    }
    let Some(path) = plan.checkpoint.as_ref().filter(|_| comm.rank() == 0) else { return Ok(()) };
    let header = Header {
        preset: plan.preset,
        model: state.model.config,
        train: plan.config,
        step: state.step,
        vocabulary: corpus.tokenizer.vocabulary(),
        values: state.model.values.len(),
        optimizers,
        history: state.history.clone(),
    };
    checkpoint::save(path, &header, &arrays)
}
