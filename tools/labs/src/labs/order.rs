//! Two communicators over the same ranks, used in different orders.

use anyhow::{Context as _, Result};
use tinynccl::{Comm, Error, ReduceOp};

use crate::ranks::Job;

pub(crate) fn run(fixed: bool) -> Result<u8> {
    Job::new(2, 2, |e| matches!(e, Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. }))
        .run(|world| step(&world, fixed))
}

/// Tensor parallelism over one communicator, data parallelism over another; here both have the same two ranks.
fn step(world: &Comm, fixed: bool) -> Result<()> {
    let tensor = world.split(Some(0), 0)?.context("every rank has a colour")?;
    let data = world.split(Some(0), 0)?.context("every rank has a colour")?;
    let (mut activations, mut gradients) = (vec![1.0f32; 64 << 10], vec![1.0f32; 64 << 10]);
    let rank = world.rank();
    // Wrong: which of the two is ready first depends on the rank.
    if rank == 0 || fixed {
        println!("rank {rank}: activations, then gradients");
        tensor.all_reduce_in_place(&mut activations, ReduceOp::Sum)?;
        data.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
    } else {
        println!("rank {rank}: gradients, then activations");
        data.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
        tensor.all_reduce_in_place(&mut activations, ReduceOp::Sum)?;
    }
    println!("rank {rank}: both sums are {} and {}", activations[0], gradients[0]);
    Ok(())
}
