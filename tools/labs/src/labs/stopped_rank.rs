//! A rank that is alive for the kernel and does nothing any more.

use anyhow::Result;
use rustix::process::{Signal, getpid, kill_process};
use tinynccl::{Comm, Error, ReduceOp};

use crate::ranks::Job;

pub(crate) fn run(fixed: bool) -> Result<u8> {
    Job::new(3, 3, |e| matches!(e, Error::Timeout { .. } | Error::Aborted { .. })).run(|comm| train(&comm, fixed))
}

fn train(comm: &Comm, fixed: bool) -> Result<()> {
    let mut gradients = vec![1.0f32; 1 << 10];
    for step in 1..=100 {
        if step == 50 && comm.rank() == 1 && !fixed {
            // As a debugger, a full terminal or a hanging file system does it: its sockets stay open.
            kill_process(getpid(), Signal::STOP)?;
        }
        gradients.fill(1.0);
        comm.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
    }
    println!("rank {}: 100 steps done", comm.rank());
    Ok(())
}
