//! Storage of gradients, and their averaging over ranks: the seam between the model and the communication library.

use anyhow::Result;
use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::process_group::ProcessGroup;

use crate::params::{ParamInfo, count};

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
    fn finish(&mut self) -> Result<()>;
}

/// In buckets, each of which is all-reduced while the backward pass goes on.
impl Gradients for Ddp<'_> {
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
        Ok(Ddp::gradient_mut(self, i)?)
    }

    fn ready(&mut self, i: usize) -> Result<()> {
        Ok(Ddp::ready(self, i)?)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(Ddp::finish(self)?)
    }
}

/// Gradients of a single rank: a plain vector, no communication.
pub struct LocalGradients {
    layout: Vec<ParamInfo>,
    /// All gradients, in the layout's order.
    pub values: Vec<f32>,
}

impl LocalGradients {
    /// Room for the gradients of `layout`.
    pub fn new(layout: &[ParamInfo]) -> Self {
        LocalGradients { layout: layout.to_vec(), values: vec![0.0; count(layout)] }
    }
}

impl Gradients for LocalGradients {
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
        Ok(&mut self.values[self.layout[i].range()])
    }

    fn ready(&mut self, _i: usize) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The gradients of a group: in buckets of at least `bucket_bytes`. Fails when another rank's parameters differ, naming
/// the first that does.
pub fn of_group<'g>(
    group: &'g ProcessGroup,
    layout: &[ParamInfo],
    bucket_bytes: usize,
) -> Result<Box<dyn Gradients + 'g>> {
    if group.size() == 1 {
        return Ok(Box::new(LocalGradients::new(layout)));
    }
    let params: Vec<ParamSpec> = layout.iter().map(|p| ParamSpec { name: p.name.clone(), len: p.len }).collect();
    let mut options = DdpOptions::default();
    options.bucket_bytes = bucket_bytes;
    Ok(Box::new(Ddp::new(group, &params, options)?))
}
