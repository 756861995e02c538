//! The path through the CPU's memory: copy down, reduce between the processes, copy up.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use cudarc::driver::{CudaSlice, CudaStream};
use tinynccl::{Comm, ReduceOp};

/// Seconds of one all-reduce of `buffer` through page-locked memory: the median over rounds of the slowest rank's time.
/// The library reduces over shared memory, one core per rank.
// EXERCISE 3 (GPUs that do not reach each other; needs GPU): time the path through the host: copy down to page-locked
// memory, wait, all-reduce there, copy up, wait; the slowest rank counts. Return the median without the first round.
pub(crate) fn seconds(comm: &Comm, stream: &Arc<CudaStream>, buffer: &mut CudaSlice<f32>) -> Result<f64> {
    // SAFETY: filled with zeros before it is read. Flags 0: cached by the CPU, so reads are fast.
    let mut pinned = unsafe { stream.context().alloc_pinned_with_flags::<f32>(buffer.len(), 0) }?;
    pinned.as_mut_slice()?.fill(0.0);
    let mut times = Vec::new();
    for _ in 0..4 {
        comm.barrier()?;
        let begin = Instant::now();
        stream.memcpy_dtoh(buffer, &mut pinned)?;
        stream.synchronize()?;
        comm.all_reduce_in_place(pinned.as_mut_slice()?, ReduceOp::Sum)?;
        stream.memcpy_htod(&pinned, buffer)?;
        stream.synchronize()?;
        let mut slowest = [begin.elapsed().as_secs_f64()];
        comm.all_reduce_in_place(&mut slowest, ReduceOp::Max)?;
        times.push(slowest[0]);
    }
    // The first round warms up.
    times.remove(0);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
