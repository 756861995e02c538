//! A training step on the CPU: batch, passes, averages, optimizer.

use std::time::Instant;

use anyhow::Result;
use tinynccl::{Comm, ReduceOp};

use super::adamw::AdamW;
use super::gradients::Gradients;
use super::model::Workspace;
use crate::data::{Batch, Corpus, Split};
use crate::dropout::Dropout;
use crate::params::Model;
use crate::train::{Engine, Pace, Plan, State};

/// A rank that computes on its threads.
pub struct Cpu<'a> {
    plan: &'a Plan,
    corpus: &'a Corpus,
    pub(super) comm: &'a Comm,
    gradients: Box<dyn Gradients + 'a>,
    batch: Batch,
    workspace: Workspace,
    /// For one sequence, when a sample is drawn.
    sampler: Option<Workspace>,
    pub(super) pace: Pace,
}

impl<'a> Cpu<'a> {
    /// Takes the memory for this rank's part of the batches.
    pub fn new(plan: &'a Plan, corpus: &'a Corpus, comm: &'a Comm, gradients: Box<dyn Gradients + 'a>) -> Result<Self> {
        let context = plan.model.context;
        let batch = Batch::new(plan.config.batch, context, comm.rank(), comm.size())?;
        let workspace = Workspace::new(&plan.model, batch.samples(), context, true, plan.threads);
        Ok(Cpu { plan, corpus, comm, gradients, batch, workspace, sampler: None, pace: Pace::default() })
    }

    /// Both passes over this rank's part of batch number `step`. Gives its loss.
    pub(super) fn passes(&mut self, model: &Model, step: usize) -> Result<f64> {
        let config = &self.plan.config;
        self.batch.fill(self.corpus, Split::Train, config.seed, step);
        let dropout = Dropout::new(config.dropout, config.seed, step, self.batch.first);
        self.workspace.forward(model, &self.batch.inputs, &dropout);
        let loss = self.workspace.cross_entropy(&self.batch.targets, true);
        self.workspace.backward(model, &self.batch.inputs, &dropout, &mut *self.gradients)?;
        Ok(loss)
    }

    /// The update of step number `step`, after [`Cpu::passes`].
    pub(super) fn update(&mut self, model: &mut Model, adamw: &mut AdamW, step: usize) -> Result<()> {
        let config = &self.plan.config;
        adamw.step(model, &mut *self.gradients, config, config.learning_rate(step), self.plan.threads)?;
        Ok(())
    }
}

impl Engine for Cpu<'_> {
    fn steps(&mut self, state: &mut State, to: usize) -> Result<Vec<f64>> {
        let mut losses = Vec::new();
        for step in state.step..to {
            let start = Instant::now();
            let mut loss = [self.passes(&state.model, step)?];
            let backward_ended = Instant::now();
            self.gradients.finish()?;
            self.comm.all_reduce_in_place(&mut loss, ReduceOp::Avg)?;
            self.pace.waited += backward_ended.elapsed().as_secs_f64();
            self.update(&mut state.model, &mut state.adamw, step)?;
            self.pace.seconds += start.elapsed().as_secs_f64();
            self.pace.steps += 1;
            losses.extend(loss);
        }
        Ok(losses)
    }

    fn evaluate(&mut self, model: &Model) -> Result<f64> {
        let mut sum = 0.0;
        for i in 0..self.plan.eval_batches {
            self.batch.fill(self.corpus, Split::Validation, self.plan.config.seed, i);
            self.workspace.forward(model, &self.batch.inputs, &Dropout::OFF);
            sum += self.workspace.cross_entropy(&self.batch.targets, false);
        }
        Ok(sum / self.plan.eval_batches as f64)
    }

    fn logits(&mut self, model: &Model, tokens: &[u32], last: usize) -> Result<Vec<f32>> {
        let alone = || Workspace::new(&model.config, 1, tokens.len(), false, self.plan.threads);
        let workspace = self.sampler.get_or_insert_with(alone);
        workspace.forward(model, tokens, &Dropout::OFF);
        Ok(workspace.logits()[last * model.config.vocab..][..model.config.vocab].to_vec())
    }

    fn pace(&self) -> Result<Pace> {
        Ok(self.pace)
    }
}
