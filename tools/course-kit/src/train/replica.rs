//! One rank's copy of the model, and the step that keeps all copies the same.
//!
//! Same start (broadcast), same gradients (all-reduce average), same arithmetic (each rank's own optimiser): so the
//! weights stay bit-identical forever, although they are never sent again.

use anyhow::{Context as _, Result};
use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::process_group::ProcessGroup;

use super::mlp::{GradientSink, Mlp, Trace};
use super::optim::Optimizer;
use super::proof;

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
    /// The ranks.
    pub group: &'g ProcessGroup,
    /// The weights.
    pub model: Mlp,
    /// Name and length of each parameter.
    pub specs: Vec<ParamSpec>,
    /// The gradients, in buckets that are averaged over the ranks.
    pub ddp: Ddp<'g>,
    /// Updates the weights.
    pub optimizer: Optimizer,
    /// Activations of the last forward pass.
    pub trace: Trace,
    /// The derivative of the loss by each output.
    pub d_output: Vec<f32>,
}

impl<'g> Replica<'g> {
    /// Every rank calls it, with a model of the same shape. The weights are our own until [`Replica::broadcast`].
    ///
    /// # Errors
    /// The ranks' models have different shapes; a rank is lost.
    pub fn new(group: &'g ProcessGroup, model: Mlp, optimizer: Optimizer, bucket_bytes: usize) -> Result<Replica<'g>> {
        let specs = model.specs();
        let mut options = DdpOptions::default();
        options.bucket_bytes = bucket_bytes;
        let ddp = Ddp::new(group, &specs, options).context("comparing the models")?;
        Ok(Replica { group, model, specs, ddp, optimizer, trace: Trace::default(), d_output: Vec::new() })
    }

    /// Makes every rank's weights equal to rank 0's.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn broadcast(&mut self) -> Result<()> {
        self.ddp.broadcast_parameters(&mut self.model.params_mut()).context("broadcasting the initial weights")
    }

    /// One step on our shard of the global batch. `loss` gets the outputs, writes its derivative with respect to them,
    /// and returns the mean over our shard, which this function returns too. All shards must have the same size, as the
    /// ranks' gradients are averaged without weights.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn step(&mut self, input: &[f32], batch: usize, loss: impl FnOnce(&[f32], &mut [f32]) -> f64) -> Result<f64> {
        let Replica { model, ddp, optimizer, trace, d_output, .. } = self;
        let output = model.forward(input, batch, trace);
        d_output.clear();
        d_output.resize(output.len(), 0.0);
        let value = loss(output, d_output);
        ddp.zero();
        model.backward(trace, d_output, ddp).context("backward")?;
        ddp.finish().context("averaging the gradients")?;
        optimizer.begin_step();
        for (index, values) in model.params_mut().into_iter().enumerate() {
            optimizer.update(index, values, ddp.gradient(index)?);
        }
        Ok(value)
    }

    /// Proves that all ranks hold the same bits, and returns their fingerprint. The proof uses the group's communicator
    /// and not the backend, as it should not depend on the code under test.
    ///
    /// # Errors
    /// The weights differ; a rank is lost.
    pub fn prove_identical(&self) -> Result<u64> {
        proof::prove_identical(self.group.comm(), &self.specs, &self.model.params())
    }

    /// Outputs for `batch` inputs, without a step. Not a collective.
    pub fn predict(&mut self, input: &[f32], batch: usize) -> &[f32] {
        self.model.forward(input, batch, &mut self.trace)
    }
}
