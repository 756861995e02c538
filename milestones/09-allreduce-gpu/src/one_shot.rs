//! The kernel of `one_shot.cu`, over memory that the library has made reachable for all ranks' kernels.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg as _};
use tinynccl::cuda::{self, DeviceComm, Registered};
use tinynccl::{Comm, ReduceOp};

use crate::cli::Options;
use crate::{measure, values};

/// Largest size that it is used for: every rank sends everything to every rank, and half of that are flags.
const MOST_BYTES: usize = 256 << 10;
/// Elements of a line, and u32 words of it.
const ELEMENTS: usize = 2;
const WORDS: usize = 4;
const THREADS: u32 = 256;
const BLOCKS: u32 = 32;

/// As `struct Windows` of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Windows {
    of: [u64; 8],
}

// SAFETY: plain words, laid out as in the kernel.
unsafe impl DeviceRepr for Windows {}

struct OneShot {
    kernel: CudaFunction,
    windows: Windows,
    /// Ours; the other ranks write to it until they have passed the barrier at the end.
    _window: Registered<u32>,
    late: CudaSlice<u32>,
    rank: u32,
    ranks: u32,
    most: u32,
    call: u32,
}

impl OneShot {
    fn new(comm: &Comm, device: &DeviceComm, stream: &Arc<CudaStream>) -> Result<OneShot> {
        let context = device.context();
        let ptx = cuda::compile("one_shot.cu", include_str!("one_shot.cu"), &[], context.compute_capability()?)?;
        let kernel = context.load_module(ptx)?.load_function("one_shot")?;
        let most = MOST_BYTES / size_of::<f32>() / ELEMENTS;
        // Two sets of lines for each rank.
        let window = device.alloc::<u32>(stream, 2 * comm.size() * most * WORDS)?;
        let mut windows = Windows { of: [0; 8] };
        ensure!(comm.size() <= windows.of.len(), "{} ranks: expected at most {}", comm.size(), windows.of.len());
        for (rank, at) in windows.of.iter_mut().take(comm.size()).enumerate() {
            let unreached = || format!("rank {rank}'s memory: {} ({})", device.path(), device.path_reason());
            *at = window.place(rank).with_context(unreached)?.0;
        }
        let late = stream.alloc_zeros(1)?;
        stream.synchronize()?;
        // No rank writes before every window is there.
        comm.barrier()?;
        let [rank, ranks, most] = [comm.rank(), comm.size(), most].map(|n| n as u32);
        Ok(OneShot { kernel, windows, _window: window, late, rank, ranks, most, call: 0 })
    }

    /// Enqueues a call.
    fn all_reduce(
        &mut self,
        stream: &Arc<CudaStream>,
        input: &CudaSlice<f32>,
        output: &mut CudaSlice<f32>,
    ) -> Result<()> {
        ensure!(input.len() == output.len() && input.len() <= ELEMENTS * self.most as usize, "buffers that fit");
        // Memory begins as zeroes, so no call has the number 0.
        self.call = self.call.wrapping_add(1).max(1);
        let count = input.len() as u32;
        let blocks = count.div_ceil(ELEMENTS as u32).div_ceil(THREADS).clamp(1, BLOCKS);
        let mut launch = stream.launch_builder(&self.kernel);
        launch.arg(input).arg(output).arg(&count).arg(&self.windows).arg(&self.rank).arg(&self.ranks);
        launch.arg(&self.most).arg(&self.call).arg(&mut self.late);
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel's parameters, in its order. It writes `count` elements of `output`, one word of `late`,
        // and lines of the windows, which stay as long as this.
        unsafe { launch.launch(config) }?;
        Ok(())
    }

    /// Waits for all calls.
    fn check(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let late = stream.clone_dtoh(&self.late)?;
        stream.synchronize()?;
        match late.first() {
            Some(0) => Ok(()),
            Some(rank) => bail!("rank {}: no line of rank {} came within 2 s", self.rank, rank - 1),
            None => bail!("no word about late ranks"),
        }
    }
}

/// Checks and times the kernel beside the library's choice, for the sizes that it takes.
pub(crate) fn table(
    comm: &Comm,
    device: &DeviceComm,
    stream: &Arc<CudaStream>,
    options: &Options,
    say: impl Fn(String),
) -> Result<()> {
    let mut ours = OneShot::new(comm, device, stream)?;
    say(format!("\nThe kernel of src/one_shot.cu, up to {MOST_BYTES} bytes, beside the library's choice:\n"));
    say("| bytes | us | library: us | library / ours |\n|---|---|---|---|".to_owned());
    for &bytes in options.bytes.iter().filter(|&&bytes| bytes <= MOST_BYTES) {
        let count = bytes / size_of::<f32>();
        let input: Vec<f32> = (0..count).map(|i| values::input(comm.rank(), i)).collect();
        let source = stream.clone_htod(&input)?;
        let mut result = stream.clone_htod(&vec![f32::NAN; count])?;
        // Twice and once more, so that both sets of lines have been used again.
        for _ in 0..3 {
            ours.all_reduce(stream, &source, &mut result)?;
        }
        let late = ours.check(stream);
        let wrong = values::difference(comm.size(), &stream.clone_dtoh(&result)?);
        let mut failed = [u8::from(late.is_err() || wrong.is_some())];
        comm.all_reduce_in_place(&mut failed, ReduceOp::Max)?;
        late?;
        if let Some(wrong) = wrong {
            bail!("rank {}: one_shot.cu, {bytes} bytes: {wrong}", comm.rank());
        }
        ensure!(failed == [0], "one_shot.cu, {bytes} bytes: it failed on another rank");
        let own = measure::seconds(comm, stream, options.iters, || ours.all_reduce(stream, &source, &mut result))?;
        let theirs = measure::seconds(comm, stream, options.iters, || {
            Ok(device.all_reduce(stream, &source, &mut result, ReduceOp::Sum)?)
        })?;
        ours.check(stream)?;
        device.check()?;
        say(format!("| {bytes} | {:.1} | {:.1} | {:.2} |", own * 1e6, theirs * 1e6, theirs / own));
    }
    // No window goes while a kernel may still write to it.
    comm.barrier()?;
    say("\nEvery element of it was checked on every rank: OK.".to_owned());
    Ok(())
}
