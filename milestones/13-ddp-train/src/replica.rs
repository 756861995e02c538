//! One rank's copy of the model, and the step that keeps all copies the same.
//!
//! Same start (broadcast), same gradients (all-reduce average), same arithmetic (each rank's own optimiser): so the
//! weights stay bit-identical forever, although they are never sent again.

use anyhow::{Context as _, Result};
use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::process_group::ProcessGroup;

use crate::mlp::{GradientSink, Mlp, Trace};
use crate::optim::Optimizer;
use crate::proof;

/// A part to leave out, to show its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Fault {
    /// No broadcast of the initial weights: every rank keeps its own random start.
    Broadcast,
    /// No averaging of the gradients: every rank steps along its own.
    Average,
}

/// The memory that backward writes gradients into.
enum Gradients<'g> {
    Averaged(Ddp<'g>),
    Local(Vec<Vec<f32>>),
}

impl GradientSink for Ddp<'_> {
    type Error = tinynccl::Error;

    /// `ready` starts the all-reduce of a bucket as soon as it has its last gradient, while backward continues.
    fn put(&mut self, index: usize, write: impl FnOnce(&mut [f32])) -> tinynccl::Result<()> {
        write(self.gradient_mut(index)?);
        self.ready(index)
    }
}

/// One rank's model, gradients and optimiser.
pub struct Replica<'g> {
    group: &'g ProcessGroup,
    model: Mlp,
    specs: Vec<ParamSpec>,
    gradients: Gradients<'g>,
    optimizer: Optimizer,
    trace: Trace,
    d_output: Vec<f32>,
}

impl<'g> Replica<'g> {
    /// Makes every rank's weights equal to rank 0's by a broadcast (unless `fault` leaves it out).
    pub fn new(
        group: &'g ProcessGroup,
        mut model: Mlp,
        optimizer: Optimizer,
        bucket_bytes: usize,
        fault: Option<Fault>,
    ) -> Result<Replica<'g>> {
        let specs = model.specs();
        let mut options = DdpOptions::default();
        options.bucket_bytes = bucket_bytes;
        let ddp = Ddp::new(group, &specs, options).context("comparing the models")?;
        if fault != Some(Fault::Broadcast) {
            ddp.broadcast_parameters(&mut model.params_mut()).context("broadcasting the initial weights")?;
        }
        let gradients = match fault {
            Some(Fault::Average) => Gradients::Local(specs.iter().map(|s| vec![0.0; s.len]).collect()),
            _ => Gradients::Averaged(ddp),
        };
        Ok(Replica { group, model, specs, gradients, optimizer, trace: Trace::default(), d_output: Vec::new() })
    }

    /// One step on our shard of the global batch. `loss` gets the outputs, writes its derivative with respect to them,
    /// and returns the mean over our shard, which this function returns too. All shards must have the same size, as the
    /// ranks' gradients are averaged without weights.
    // EXERCISE 3 (How it works): forward, loss, backward into the buckets, wait for the averages, and update every
    // parameter by its averaged gradient; without averaging, by our own.
    pub fn step(&mut self, input: &[f32], batch: usize, loss: impl FnOnce(&[f32], &mut [f32]) -> f64) -> Result<f64> {
        let output = self.model.forward(input, batch, &mut self.trace);
        self.d_output.clear();
        self.d_output.resize(output.len(), 0.0);
        let value = loss(output, &mut self.d_output);
        self.optimizer.begin_step();
        match &mut self.gradients {
            Gradients::Averaged(ddp) => {
                ddp.zero();
                self.model.backward(&self.trace, &self.d_output, ddp).context("backward")?;
                ddp.finish().context("averaging the gradients")?;
                for (index, values) in self.model.params_mut().into_iter().enumerate() {
                    self.optimizer.update(index, values, ddp.gradient(index)?);
                }
            }
            Gradients::Local(gradients) => {
                gradients.iter_mut().for_each(|g| g.fill(0.0));
                self.model.backward(&self.trace, &self.d_output, gradients)?;
                for (index, values) in self.model.params_mut().into_iter().enumerate() {
                    self.optimizer.update(index, values, &gradients[index]);
                }
            }
        }
        Ok(value)
    }

    /// Proves that all ranks hold the same bits, and returns their fingerprint. The proof uses the group's communicator
    /// and not the backend, as it should not depend on the code under test.
    pub fn prove_identical(&self) -> Result<u64> {
        proof::prove_identical(self.group.comm(), &self.specs, &self.model.params())
    }

    /// Outputs for `batch` inputs, without a step. Not a collective.
    pub fn predict(&mut self, input: &[f32], batch: usize) -> &[f32] {
        self.model.forward(input, batch, &mut self.trace)
    }

    /// The optimiser, to change its rate.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// Number of gradient buckets, which is that of all-reduces per step. 0 when the gradients stay local.
    pub fn buckets(&self) -> usize {
        match &self.gradients {
            Gradients::Averaged(ddp) => ddp.buckets(),
            Gradients::Local(_) => 0,
        }
    }

    /// The model.
    pub fn model(&self) -> &Mlp {
        &self.model
    }
}
