//! The seam filled with tinynccl: gradients averaged by [`Ddp`], everything else by the group.

use std::time::Instant;

use anyhow::Result;
use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::process_group::ProcessGroup;
use tinynccl::{Comm, ReduceOp};

use crate::gradients::{CommTime, Gradients, Ranks};
use crate::params::ParamInfo;

/// Gradients in buckets that are reduced while the backward pass goes on.
#[derive(Debug)]
pub struct DistributedGradients<'g> {
    ddp: Ddp<'g>,
}

impl<'g> DistributedGradients<'g> {
    /// Buckets for `layout`; fails when another rank's parameters differ, naming the first that does.
    pub fn new(group: &'g ProcessGroup, layout: &[ParamInfo], bucket_bytes: usize) -> Result<Self> {
        let params: Vec<ParamSpec> = layout.iter().map(|p| ParamSpec { name: p.name.clone(), len: p.len }).collect();
        let mut options = DdpOptions::default();
        options.bucket_bytes = bucket_bytes;
        Ok(DistributedGradients { ddp: Ddp::new(group, &params, options)? })
    }

    /// Number of all-reduces per step.
    pub fn buckets(&self) -> usize {
        self.ddp.buckets()
    }
}

impl Gradients for DistributedGradients<'_> {
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
        Ok(self.ddp.gradient_mut(i)?)
    }

    fn ready(&mut self, i: usize) -> Result<()> {
        Ok(self.ddp.ready(i)?)
    }

    fn finish(&mut self) -> Result<CommTime> {
        let start = Instant::now();
        self.ddp.finish()?;
        Ok(CommTime { exposed: start.elapsed() })
    }

    fn broadcast_parameters(&mut self, parameters: &mut [&mut [f32]]) -> Result<()> {
        Ok(self.ddp.broadcast_parameters(parameters)?)
    }
}

/// A communicator as the training loop sees it.
#[derive(Debug)]
pub struct CommRanks<'c>(pub &'c Comm);

impl Ranks for CommRanks<'_> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn mean(&mut self, values: &mut [f64]) -> Result<()> {
        Ok(self.0.all_reduce_in_place(values, ReduceOp::Avg)?)
    }

    fn barrier(&mut self) -> Result<()> {
        Ok(self.0.barrier()?)
    }
}
