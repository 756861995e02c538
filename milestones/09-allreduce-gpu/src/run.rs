//! One rank: its GPU, the communicator, every size checked and timed.

use anyhow::{Context, Result, bail};
use cudarc::driver::CudaContext;
use tinynccl::cuda::{self, Choice, DeviceComm, Framing, Path, Protocol};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Comm, ReduceOp};

use crate::cli::Options;
use crate::{host, measure, one_shot, values};

pub(crate) fn rank(options: &Options) -> Result<()> {
    let comm = Comm::from_env()?;
    let gpus = cuda::device_count()?;
    let ordinal = comm.local_rank() % gpus.max(1);
    let context = CudaContext::new(ordinal).with_context(|| format!("cannot open GPU {ordinal}"))?;
    let device = DeviceComm::new(&comm, &context)?;
    let say = |line: String| {
        if comm.rank() == 0 {
            println!("{line}");
        }
    };
    introduce(&comm, &device, &context.name()?, say)?;

    let stream = context.new_stream()?;
    say("| bytes | way | us | algbw | busbw | through the CPU: us | ratio |".to_owned());
    say("|---|---|---|---|---|---|---|".to_owned());
    for &bytes in &options.bytes {
        if let Some(algorithm) = options.algorithm {
            schedule(&device, algorithm, bytes)?;
        }
        let count = bytes / size_of::<f32>();
        let input: Vec<f32> = (0..count).map(|i| values::input(comm.rank(), i)).collect();
        let source = stream.clone_htod(&input)?;
        // NaN is never a valid sum, so an element that the call does not write is found.
        let mut result = stream.clone_htod(&vec![f32::NAN; count])?;
        device.all_reduce(&stream, &source, &mut result, ReduceOp::Sum)?;
        device.synchronize()?;
        let wrong = values::difference(comm.size(), &stream.clone_dtoh(&result)?);
        agree(&comm, wrong.as_deref(), bytes)?;

        let seconds = measure::seconds(&comm, &stream, options.iters, || {
            Ok(device.all_reduce(&stream, &source, &mut result, ReduceOp::Sum)?)
        })?;
        device.check()?;
        let slow = host::seconds(&comm, &stream, &mut result)?;
        let way = match device.path() {
            Path::Peer => {
                let choice = device.choice(Collective::AllReduce, bytes);
                format!("{} x {}", choice.protocol, choice.blocks)
            }
            Path::Phased => "phases".to_owned(),
            Path::Hosted => "hosted".to_owned(),
            Path::Hosts => "hosts".to_owned(),
        };
        let algbw = bytes as f64 / seconds / 1e9;
        let n = comm.size() as f64;
        say(format!(
            "| {bytes} | {way} | {:.1} | {algbw:.2} | {:.2} | {:.1} | {:.1} |",
            seconds * 1e6,
            algbw * 2.0 * (n - 1.0) / n,
            slow * 1e6,
            slow / seconds
        ));
    }
    say("\nEvery element was checked on every rank: OK. algbw and busbw in GB/s; ratio: time through the CPU / time."
        .to_owned());
    if options.own_kernel {
        one_shot::table(&comm, &device, &stream, options, say)?;
    }
    Ok(())
}

/// Makes all later calls use `algorithm`: with flags beside the data where that fits, else through slots.
fn schedule(device: &DeviceComm, algorithm: Algorithm, bytes: usize) -> Result<()> {
    for framing in [Framing::Ll, Framing::Simple] {
        let protocol = Protocol::Schedule(algorithm, framing);
        let wish = Choice { protocol, blocks: protocol.blocks(bytes) };
        device.set_choice(Some(wish));
        if device.choice(Collective::AllReduce, bytes) == wish {
            return Ok(());
        }
    }
    bail!("{algorithm} has no schedule for an all_reduce of {} ranks that the GPUs can run", device.size())
}

/// Prints each rank's process and GPU, in rank order.
fn introduce(comm: &Comm, device: &DeviceComm, name: &str, say: impl Fn(String)) -> Result<()> {
    let line =
        format!("rank {}: process {}, GPU {}, {name}", comm.rank(), std::process::id(), device.context().ordinal());
    let mut ours = [0u8; 128];
    let length = line.len().min(ours.len());
    ours[..length].copy_from_slice(&line.as_bytes()[..length]);
    let mut all = vec![0u8; ours.len() * comm.size()];
    comm.all_gather(&ours, &mut all)?;
    for line in all.chunks(ours.len()) {
        say(String::from_utf8_lossy(line).trim_end_matches('\0').to_owned());
    }
    say(format!("path: {} ({})", device.path(), device.path_reason()));
    say(match device.path() {
        Path::Peer => format!(
            "Each rank's kernels write into a window of {} MiB of every other GPU.\n",
            device.window_bytes() >> 20
        ),
        Path::Phased => "Kernels take turns, so none of them waits for another; the streams do.\n".to_owned(),
        Path::Hosted => "Copies to the host, a reduction there, copies back, all at the same time.\n".to_owned(),
        Path::Hosts => "Kernels inside each host; between the hosts each rank passes on its share.\n".to_owned(),
    });
    Ok(())
}

/// Fails on all ranks when one has a wrong element.
fn agree(comm: &Comm, wrong: Option<&str>, bytes: usize) -> Result<()> {
    let mut any = [u8::from(wrong.is_some())];
    comm.all_reduce_in_place(&mut any, ReduceOp::Max)?;
    match wrong {
        Some(wrong) => bail!("all_reduce of {bytes} bytes: {wrong}"),
        None if any[0] > 0 => bail!("all_reduce of {bytes} bytes: another rank has wrong elements"),
        None => Ok(()),
    }
}
