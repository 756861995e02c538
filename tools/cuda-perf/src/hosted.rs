//! The path through the hosts' memory beside its bounds: the two copies alone, and the host's collective alone.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use cudarc::driver::CudaStream;
use program_kit::stats::median;
use tinynccl::cuda::DeviceComm;
use tinynccl::{Comm, ReduceOp};

use crate::Options;
use crate::task::{Operation, Task};
use crate::timing::Timer;

/// Prints a table for each operation. `host/hosted` is the time of the slowest of the three stages over the total: 1 is
/// the bound of one worker.
pub(crate) fn table(options: &Options, comm: &Comm, device: &DeviceComm) -> Result<()> {
    let say = |line: String| {
        if comm.rank() == 0 {
            println!("{line}");
        }
    };
    let stream = device.context().new_stream()?;
    say(format!(
        "{} ranks, {}: {} ({}); {:?}, {} MiB of host memory each",
        comm.size(),
        device.context().name()?,
        device.path(),
        device.path_reason(),
        comm.config().transport,
        device.window_bytes() >> 20
    ));
    for &operation in &options.operation {
        say(format!(
            "\n{operation:?}\n| bytes | hosted us | busbw GB/s | down us | up us | host us | bound / hosted |"
        ));
        say(format!("|{}", "---|".repeat(7)));
        for task in options.tasks(operation, comm.size()) {
            say(row(options, comm, device, &stream, &task, task.bytes())?);
        }
    }
    Ok(())
}

fn row(
    options: &Options,
    comm: &Comm,
    device: &DeviceComm,
    stream: &Arc<CudaStream>,
    task: &Task,
    bytes: usize,
) -> Result<String> {
    let buffers = task.buffers(stream, comm.rank(), None)?;
    let timer = Timer { comm, stream, iters: options.iters, rounds: options.rounds, graph: false };
    let hosted = timer.time(|| crate::ours::enqueue(device, stream, task, &buffers))?;
    device.check()?;

    // Bytes to copy down and up on this rank, as nccl-tests count the buffer's bytes.
    let n = comm.size();
    let (down, up) = match task.operation {
        Operation::AllGather => (bytes / n, bytes - bytes / n),
        Operation::ReduceScatter => (bytes, bytes / n),
        Operation::AllToAll => (bytes - bytes / n, bytes - bytes / n),
        Operation::Gather if comm.rank() != 0 => (bytes / n, 0),
        Operation::Scatter if comm.rank() != 0 => (0, bytes / n),
        Operation::Gather => (0, bytes - bytes / n),
        Operation::Scatter => (bytes - bytes / n, 0),
        _ => (bytes, bytes),
    };
    // SAFETY: written before it is read. Flags 0: cached by the CPU.
    let mut pinned = unsafe { stream.context().alloc_pinned_with_flags::<u8>(bytes, 0) }?;
    pinned.as_mut_slice()?.fill(0);
    let mut memory = stream.alloc_zeros::<u8>(bytes)?;
    let down = timer.time(|| Ok(stream.memcpy_dtoh(&memory.slice(..down), &mut pinned.as_mut_slice()?[..down])?))?;
    let up = timer.time(|| Ok(stream.memcpy_htod(&pinned.as_slice()?[..up], &mut memory.slice_mut(..up))?))?;

    let host = host(options, comm, task, bytes)?;
    let bound = down.max(up).max(host);
    Ok(format!(
        "| {bytes} | {:.1} | {:.2} | {:.1} | {:.1} | {:.1} | {:.2} |",
        hosted * 1e6,
        task.busbw(hosted),
        down * 1e6,
        up * 1e6,
        host * 1e6,
        bound / hosted
    ))
}

/// Seconds of the host's collective, one thread per rank, from memory that the ranks of a host share (f32).
fn host(options: &Options, comm: &Comm, task: &Task, bytes: usize) -> Result<f64> {
    let n = comm.size();
    let (len, part) = (bytes / 4, bytes / 4 / n);
    let (mut input, mut output) = (comm.alloc::<f32>(len)?, comm.alloc::<f32>(len)?);
    let mut times = Vec::new();
    for _ in 0..=options.rounds.min(5) {
        comm.barrier()?;
        let begin = Instant::now();
        for _ in 0..options.iters.min(5) {
            match task.operation {
                Operation::AllReduce => comm.all_reduce_in_place(&mut output, ReduceOp::Sum)?,
                Operation::AllGather => comm.all_gather(&input[..part], &mut output[..n * part])?,
                Operation::ReduceScatter => {
                    comm.reduce_scatter(&input[..n * part], &mut output[..part], ReduceOp::Sum)?;
                }
                Operation::Broadcast => comm.broadcast_in_place(&mut output, 0)?,
                Operation::Reduce => comm.reduce(&input, &mut output, ReduceOp::Sum, 0)?,
                Operation::AllToAll => comm.all_to_all(&input[..n * part], &mut output[..n * part])?,
                Operation::Gather => comm.gather(&input[..part], &mut output[..n * part], 0)?,
                Operation::Scatter => comm.scatter(&input[..n * part], &mut output[..part], 0)?,
                Operation::SendRecv => {
                    let (rank, n) = (comm.rank(), comm.size());
                    comm.send_recv(&input, (rank + 1) % n, &mut output, (rank + n - 1) % n)?;
                }
            }
        }
        let mut mean = [begin.elapsed().as_secs_f64() / f64::from(options.iters.min(5))];
        comm.all_reduce_in_place(&mut mean, ReduceOp::Max)?;
        times.push(mean[0]);
    }
    input[..len.min(1)].fill(0.0);
    // The first one warms up.
    median(&times[1..]).context("no rounds")
}
