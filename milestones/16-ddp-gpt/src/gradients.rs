//! Where gradients live and how ranks share them: the seam between the model and the communication library.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::params::{ParamInfo, count};

/// What the communication of one step cost.
#[derive(Debug, Clone, Copy, Default)]
pub struct CommTime {
    /// Time that the step spent waiting for it, in `ready` and `finish`: the part that overlap could not hide.
    pub exposed: Duration,
}

/// Gradients of all parameters, averaged over the ranks as they become ready.
///
/// One step: the backward pass writes each gradient through [`gradient_mut`](Gradients::gradient_mut) (it overwrites:
/// nothing is left of the last step) and calls [`ready`](Gradients::ready) once for each, in the same order on every
/// rank; then [`finish`](Gradients::finish); then [`gradient_mut`](Gradients::gradient_mut) holds the average.
pub trait Gradients {
    /// The gradient of parameter `i`.
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]>;

    /// Parameter `i`'s gradient is final on this rank: averaging it may start.
    fn ready(&mut self, i: usize) -> Result<()>;

    /// Waits until every gradient is the average over the ranks.
    fn finish(&mut self) -> Result<CommTime>;

    /// Gives every rank rank 0's parameters.
    fn broadcast_parameters(&mut self, parameters: &mut [&mut [f32]]) -> Result<()>;
}

/// The ranks as the training loop sees them, beside gradients.
pub trait Ranks {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Replaces each value by its mean over the ranks.
    fn mean(&mut self, values: &mut [f64]) -> Result<()>;

    /// Returns when every rank has called it.
    fn barrier(&mut self) -> Result<()>;
}

/// Fails on at least one rank when `value` is not the same on all; `what` says what it stands for.
pub fn agree(ranks: &mut dyn Ranks, what: &str, value: u32) -> Result<()> {
    let mut mean = [f64::from(value)];
    ranks.mean(&mut mean)?;
    if (mean[0] - f64::from(value)).abs() > 1e-3 {
        bail!("rank {}: {what} is not the same as on the other ranks; every rank must be given the same", ranks.rank());
    }
    Ok(())
}

/// Gradients of a single rank: a plain vector and nobody to talk to.
#[derive(Debug)]
pub struct LocalGradients {
    layout: Vec<ParamInfo>,
    values: Vec<f32>,
}

impl LocalGradients {
    /// Room for the gradients of `layout`.
    pub fn new(layout: &[ParamInfo]) -> Self {
        LocalGradients { layout: layout.to_vec(), values: vec![0.0; count(layout)] }
    }

    /// All gradients, in the layout's order.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Gradients for LocalGradients {
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
        Ok(&mut self.values[self.layout[i].range()])
    }

    fn ready(&mut self, _i: usize) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self) -> Result<CommTime> {
        Ok(CommTime::default())
    }

    fn broadcast_parameters(&mut self, _parameters: &mut [&mut [f32]]) -> Result<()> {
        Ok(())
    }
}

/// A single rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct OneRank;

impl Ranks for OneRank {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn mean(&mut self, _values: &mut [f64]) -> Result<()> {
        Ok(())
    }

    fn barrier(&mut self) -> Result<()> {
        Ok(())
    }
}
