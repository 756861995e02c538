//! Two GPUs train in step, and one of them has something else to do as well.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PinnedHostSlice, PushKernelArg as _};
use program_kit::stats::median;
use tinynccl::ReduceOp;
use tinynccl::process_group::BufferMut;

use crate::gpu::{kernel, multiprocessors};
use crate::ranks::Announced;

const STEPS: usize = 20;
const ELEMENTS: usize = 4 << 20;
/// Rounds of arithmetic of a backward pass: some milliseconds on a GPU that does nothing else.
const ROUNDS: u32 = 1_000_000;
/// Nanoseconds after which the other job ends, unless it is stopped before.
const LIMIT: u64 = 20_000_000_000;
/// Ratio of the two GPUs' compute times above which one is slow.
const SLOW: f64 = 1.3;

#[derive(Debug, Clone, clap::Args)]
#[group(id = "slow-gpu")]
pub(crate) struct Options {
    #[command(flatten)]
    gpu: crate::gpu::Options,
    /// Time the two parts of a step apart.
    #[arg(long)]
    apart: bool,
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    options.gpu.run(|group, context| {
        let (rank, stream) = (group.rank(), context.new_stream()?);
        let backward = kernel(context, "compute")?;
        let mut gradients = stream.alloc_zeros::<f32>(ELEMENTS)?;
        let blocks = multiprocessors(context)?;
        let mut step = || -> Result<[f64; 2]> {
            let begin = Instant::now();
            let (n, rounds) = (ELEMENTS as u64, ROUNDS);
            let mut launch = stream.launch_builder(&backward);
            launch.arg(&mut gradients).arg(&n).arg(&rounds);
            // SAFETY: the kernel's parameters, in its order; it writes `n` elements.
            unsafe { launch.launch(config(blocks)) }?;
            stream.synchronize()?;
            let computed = begin.elapsed();
            group.all_reduce_in_place(BufferMut::device(&stream, &mut gradients), ReduceOp::Avg)?;
            stream.synchronize()?;
            Ok([computed, begin.elapsed() - computed].map(|time| time.as_secs_f64() * 1e3))
        };
        // The first step opens what the group needs, and loads the kernels: the driver does that when a kernel is first
        // launched, and waits for all that run.
        step()?;
        let other = match rank {
            1 if !options.gpu.fixed => Some(Other::start(context, blocks)?),
            _ => None,
        };
        let times = (0..STEPS).map(|_| step()).collect::<Result<Vec<_>>>()?;
        other.map_or(Ok(()), Other::end)?;
        let [compute, reduce] =
            [0, 1].map(|part| median(&times.iter().map(|times| times[part]).collect::<Vec<f64>>()).unwrap_or_default());
        if options.apart {
            println!("rank {rank}: backward {compute:.1} ms, all_reduce {reduce:.1} ms");
        } else {
            println!("rank {rank}: a step takes {:.1} ms", compute + reduce);
        }
        let mut all = [0.0; 2];
        group.comm().all_gather(&[compute], &mut all)?;
        let [fast, slow] = if all[0] < all[1] { all } else { [all[1], all[0]] };
        if slow > SLOW * fast {
            bail!(Announced(format!("rank {rank}: no call has failed, and the job was faster yesterday")));
        }
        Ok(())
    })
}

fn config(blocks: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (1024, 1, 1), shared_mem_bytes: 0 }
}

/// Another job on the GPU: a kernel that computes on half of the multiprocessors. The others have room for the kernels
/// of a collective, which wait for each other and take a multiprocessor each (lab 17).
struct Other {
    stream: Arc<CudaStream>,
    /// Unloading it would wait for the kernel.
    _occupy: CudaFunction,
    /// Not 0: the kernel ends. It reads this while it runs.
    stop: PinnedHostSlice<u32>,
}

impl Other {
    fn start(context: &Arc<CudaContext>, blocks: u32) -> Result<Other> {
        let stream = context.new_stream()?;
        let occupy = kernel(context, "occupy")?;
        // SAFETY: written before the kernel can read it.
        let mut stop = unsafe { context.alloc_pinned_with_flags::<u32>(1, 0) }?;
        stop.as_mut_slice()?.fill(0);
        // Page-locked memory has the same address on the GPU.
        let (address, limit) = (stop.as_mut_ptr()? as u64, LIMIT);
        let mut launch = stream.launch_builder(&occupy);
        launch.arg(&address).arg(&limit);
        // SAFETY: the kernel's parameters, in its order. `end` and the driver's free of `stop` wait for it.
        unsafe { launch.launch(config(blocks / 2)) }?;
        Ok(Other { stream, _occupy: occupy, stop })
    }

    fn end(mut self) -> Result<()> {
        let flag = self.stop.as_mut_slice()?.first_mut().context("no flag")?;
        // SAFETY: a word of ours; the kernel reads it as volatile.
        unsafe { std::ptr::from_mut(flag).write_volatile(1) };
        Ok(self.stream.synchronize()?)
    }
}
