//! Training with many local steps between two averages, for slow networks: DiLoCo.
//!
//! ```text
//!   outer parameters ─▶ H steps of AdamW, on every rank alone ─▶ how far they went ─▶ one all_reduce ─▶ outer step
//!    └─ the same on all ranks                                    └─ this rank's round                    └─ the same
//! ```
//! Outer parameters and momentum change only after the one call of a round. A rank that dies in its local steps
//! interrupts no other rank before that call. A call that a death has interrupted is repeated in the new group with the
//! same contributions of the ranks that are left: their steps are not lost.

use std::time::Instant;

use anyhow::Result;
use tinynccl::{Comm, ReduceOp};

use super::gradients::LocalGradients;
use super::outer::Outer;
use super::step::Cpu;
use crate::config::OuterConfig;
use crate::data::Corpus;
use crate::params::Model;
use crate::train::{Engine, Pace, Plan, State};

/// A rank's contribution to an outer step.
#[derive(Debug, Clone)]
pub struct Round {
    /// Step with which the round begins.
    pub step: usize,
    /// Pseudo-gradient, the losses of the steps, and 1; `None`: the rank was not there, and counts as 0 ranks.
    pub contribution: Option<Vec<f32>>,
}

/// A rank that takes local steps on its threads.
pub struct LocalSteps<'a> {
    cpu: Cpu<'a>,
    config: OuterConfig,
}

impl<'a> LocalSteps<'a> {
    /// Takes the memory for this rank's part of the batches.
    pub fn new(plan: &'a Plan, config: OuterConfig, corpus: &'a Corpus, comm: &'a Comm, model: &Model) -> Result<Self> {
        let gradients = LocalGradients::new(&model.layout);
        Ok(LocalSteps { cpu: Cpu::new(plan, corpus, comm, Box::new(gradients))?, config })
    }

    /// This rank's steps up to `to`. The parameters stay as they were.
    fn alone(&mut self, State { model, adamw, step, .. }: &mut State, to: usize) -> Result<Round> {
        let outer = model.values.clone();
        let mut losses = Vec::new();
        for step in *step..to {
            losses.push(self.cpu.passes(model, step)? as f32);
            self.cpu.update(model, adamw, step)?;
        }
        let local = std::mem::replace(&mut model.values, outer);
        let gone = model.values.iter().zip(local).map(|(outer, local)| outer - local);
        Ok(Round { step: *step, contribution: Some(gone.chain(losses).chain([1.0]).collect()) })
    }
}

impl Engine for LocalSteps<'_> {
    fn steps(&mut self, state: &mut State, to: usize) -> Result<Vec<f64>> {
        let start = Instant::now();
        let (from, count) = (state.step, state.model.values.len());
        let mut sum = vec![0.0; count + (to - from) + 1];
        let nothing = sum.clone();
        let ranks = loop {
            if state.round.as_ref().is_none_or(|round| round.step != from) {
                state.round = Some(self.alone(state, to)?);
            }
            let contribution = state.round.as_ref().and_then(|round| round.contribution.as_ref()).unwrap_or(&nothing);
            let begun = Instant::now();
            // Not in place: after an error the same contribution goes to the ranks that are left.
            self.cpu.comm.all_reduce(contribution, &mut sum, ReduceOp::Sum)?;
            self.cpu.pace.waited += begun.elapsed().as_secs_f64();
            state.round = None;
            match sum.pop() {
                Some(ranks) if ranks > 0.0 => break ranks,
                // All ranks that did this round have died since: it begins again, with the moments that they left.
                _ => state.adamw.updates = from,
            }
            sum.push(0.0);
        };
        let (gradient, losses) = sum.split_at(count);
        let outer = state.outer.get_or_insert_with(|| Outer::new(count));
        outer.step(&mut state.model.values, gradient, ranks, &self.config);
        self.cpu.pace.seconds += start.elapsed().as_secs_f64();
        self.cpu.pace.steps += to - from;
        Ok(losses.iter().map(|sum| f64::from(sum / ranks)).collect())
    }

    fn evaluate(&mut self, model: &Model) -> Result<f64> {
        self.cpu.evaluate(model)
    }

    fn logits(&mut self, model: &Model, tokens: &[u32], last: usize) -> Result<Vec<f32>> {
        self.cpu.logits(model, tokens, last)
    }

    fn pace(&self) -> Result<Pace> {
        self.cpu.pace()
    }
}
