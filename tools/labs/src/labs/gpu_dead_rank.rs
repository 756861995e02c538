//! A rank that the kernel kills while the other one's GPU waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use cudarc::driver::CudaStream;
use rustix::process::{Signal, getpid, kill_process};
use tinynccl::ReduceOp;
use tinynccl::process_group::BufferMut;

use crate::gpu::{Options, job};
use crate::ranks::Announced;

/// Time for which a program over NCCL polls its stream before it gives a step up.
const WATCHDOG: Duration = Duration::from_secs(10);

pub(crate) fn run(options: &Options) -> Result<u8> {
    let job = job().killed_by(Signal::KILL).grace(2 * WATCHDOG);
    options.run_job(&job, |group, context| {
        let rank = group.rank();
        let stream = context.new_stream()?;
        let mut gradients = stream.alloc_zeros::<f32>(1 << 20)?;
        for step in 1..=100 {
            if step == 50 && rank == 1 && !options.fixed {
                // As the kernel's out-of-memory killer does it: no destructor runs, no goodbye is sent.
                kill_process(getpid(), Signal::KILL)?;
            }
            let mut batch = group.batch();
            batch.all_reduce_in_place(BufferMut::device(&stream, &mut gradients), ReduceOp::Avg)?;
            batch.enqueue()?;
            if options.is_nccl() { watch(&stream, rank, step)? } else { group.synchronize(&stream)? }
        }
        println!("rank {rank}: 100 steps done");
        Ok(())
    })
}

/// Waits as a program does that has NCCL alone: it sees its stream, and no other rank.
fn watch(stream: &Arc<CudaStream>, rank: usize, step: usize) -> Result<()> {
    let (end, reached) = (Instant::now() + WATCHDOG, stream.record_event(None)?);
    while !reached.try_is_complete()? {
        if Instant::now() >= end {
            let waited = WATCHDOG.as_secs();
            bail!(Announced(format!("rank {rank}: step {step} has not ended for {waited} s, and no call has failed")));
        }
        std::thread::yield_now();
    }
    Ok(())
}
