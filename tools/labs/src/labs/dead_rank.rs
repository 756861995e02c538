//! A rank that the kernel kills in the middle of a training.

use anyhow::Result;
use rustix::process::{Signal, getpid, kill_process};
use tinynccl::{Comm, Error, ReduceOp};

use crate::ranks::Job;

pub(crate) fn run(fixed: bool) -> Result<u8> {
    Job::new(3, 30, |e| matches!(e, Error::PeerLost { peer: 2, .. }))
        .killed_by(Signal::KILL)
        .run(|comm| train(&comm, fixed))
}

fn train(comm: &Comm, fixed: bool) -> Result<()> {
    let mut gradients = vec![1.0f32; 1 << 10];
    for step in 1..=100 {
        if step == 50 && comm.rank() == 2 && !fixed {
            // As the kernel's out-of-memory killer does it: no destructor runs, no goodbye is sent.
            kill_process(getpid(), Signal::KILL)?;
        }
        gradients.fill(1.0);
        comm.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
    }
    println!("rank {}: 100 steps done", comm.rank());
    Ok(())
}
