//! Collectives on GPUs beside NCCL's. One process per GPU; both libraries in the same processes, in turn at each size.
//!
//! Two CUDA events time `--iters` calls back to back. A time is the median over `--rounds` of the slowest rank's mean.
//! NCCL is loaded as `libnccl.so` (put a folder with such a link into LD_LIBRARY_PATH); without it our library runs
//! alone.

mod hosted;
mod nccl;
mod ours;
mod task;
mod timing;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use cudarc::driver::CudaContext;
use tinynccl::config::CudaPath;
use tinynccl::cuda::{self, Choice, DeviceComm, Framing, Path, Protocol};
use tinynccl::launch::{self, Launcher};
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, DType, Error};

use task::{Operation, Task};

/// Times collectives on GPUs, beside NCCL.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Ranks to start, one per GPU; 0: as many as there are GPUs.
    #[arg(long, default_value_t = 0)]
    ranks: usize,
    /// Operations to measure.
    #[arg(long, value_delimiter = ',', default_value = "all-reduce")]
    operation: Vec<Operation>,
    /// Element type (f32 or bf16).
    #[arg(short, long, default_value = "f32")]
    dtype: DType,
    /// Smallest size in bytes, as nccl-tests count it: the whole buffer, of all ranks for all-gather.
    #[arg(short, long, default_value_t = 8)]
    begin: usize,
    /// Largest size in bytes.
    #[arg(short, long, default_value_t = 512 << 20)]
    end: usize,
    /// Factor between sizes.
    #[arg(short, long, default_value_t = 4)]
    factor: usize,
    /// Calls between two events.
    #[arg(long, default_value_t = 20)]
    iters: u32,
    /// Measurements of each.
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Launches the calls as one CUDA graph.
    #[arg(long)]
    graph: bool,
    /// Path of the data (auto, peer or hosted); overrides TINYNCCL_CUDA_PATH. For the hosted path the table has the
    /// times of its stages instead of NCCL's; ranks may then share GPUs.
    #[arg(long)]
    path: Option<CudaPath>,
    /// Use buffers that are registered with the communicator; NCCL then also runs with windows of its own.
    #[arg(long)]
    registered: bool,
    /// Print the path and the protocol of each call, and the reasons, without timing it.
    #[arg(long)]
    explain: bool,
    /// Leave NCCL out.
    #[arg(long)]
    alone: bool,
    /// Time these instead of the library's choice: protocol and blocks, as `one-shot:8`, `two-shot:32` (LL),
    /// `one-shot-128:8`, `two-shot-128:32` (LL128), `simple:64`, `direct:128`, or a schedule, as `ring:64` (protocol
    /// Simple), `ring-ll:16` and `ring-128:64`.
    #[arg(long, value_delimiter = ',', value_parser = choice)]
    choices: Vec<Choice>,
    /// Schedules to time beside the library's choice, as `ring,tree,double-tree`: in both protocols, with blocks by
    /// size.
    #[arg(long, value_delimiter = ',', conflicts_with = "choices")]
    algorithm: Vec<Algorithm>,
}

impl Options {
    /// An operation of every size that can be cut into the segments.
    fn tasks(&self, operation: Operation, ranks: usize) -> impl Iterator<Item = Task> {
        let sizes = std::iter::successors(Some(self.begin), |bytes| bytes.checked_mul(self.factor));
        let sizes = sizes.take_while(|&bytes| bytes <= self.end);
        sizes.filter_map(move |bytes| Task::new(operation, self.dtype, bytes, ranks))
    }

    /// The choices to time for a call of `bytes`, always the same number; `None` is the library's.
    fn ways(&self, bytes: usize) -> Vec<Option<Choice>> {
        if !self.choices.is_empty() {
            return self.choices.iter().copied().map(Some).collect();
        }
        let schedules = self.algorithm.iter().flat_map(|&algorithm| {
            [Framing::Ll, Framing::Ll128, Framing::Simple].map(|framing| {
                let protocol = Protocol::Schedule(algorithm, framing);
                Some(Choice { protocol, blocks: protocol.blocks(bytes) })
            })
        });
        std::iter::once(None).chain(schedules).collect()
    }

    fn names(&self) -> Vec<String> {
        let name = |way: &Option<Choice>| match way {
            None => "tinynccl us".to_owned(),
            Some(choice) if self.choices.is_empty() => format!("{} us", choice.protocol),
            Some(choice) => format!("{}:{}", choice.protocol, choice.blocks),
        };
        self.ways(0).iter().map(name).collect()
    }
}

fn choice(text: &str) -> Result<Choice, String> {
    let wrong = || format!("expected a protocol and blocks, as simple:64, got {text:?}");
    let (name, blocks) = text.split_once(':').ok_or_else(wrong)?;
    let protocol = match name {
        "one-shot" => Protocol::OneShot,
        "two-shot" => Protocol::TwoShot,
        "one-shot-128" => Protocol::OneShot128,
        "two-shot-128" => Protocol::TwoShot128,
        "simple" => Protocol::Simple,
        "direct" => Protocol::Direct,
        _ => {
            let framings = [("-ll", Framing::Ll), ("-128", Framing::Ll128), ("", Framing::Simple)];
            let named = framings.iter().find_map(|&(suffix, framing)| Some((name.strip_suffix(suffix)?, framing)));
            let (name, framing) = named.ok_or_else(wrong)?;
            Protocol::Schedule(name.parse().map_err(|_| wrong())?, framing)
        }
    };
    Ok(Choice { protocol, blocks: blocks.parse().map_err(|_| wrong())? })
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let options = Options::parse();
    program_kit::exit_code(start(&options), |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}

fn start(options: &Options) -> Result<i32> {
    if !launch::is_rank() {
        let gpus = cuda::device_count()?;
        let ranks = if options.ranks == 0 { gpus } else { options.ranks };
        return Ok(Launcher::new(ranks).plain_rank0(true).run_self()?);
    }
    let mut config = Config::from_env()?;
    config.cuda_path = options.path.unwrap_or(config.cuda_path);
    let comm = Comm::from_env_with(config)?;
    let ordinal = comm.local_rank() % cuda::device_count()?.max(1);
    let context = CudaContext::new(ordinal).context("cannot open this rank's GPU")?;
    // One stream runs all work in order, so no event between calls is needed.
    // SAFETY: all memory here is used in one stream.
    unsafe { context.disable_event_tracking() };
    let device = DeviceComm::new(&comm, &context)?;
    if options.explain {
        explain(options, &comm, &device);
        return Ok(0);
    }
    if device.path() == Path::Hosted {
        hosted::table(options, &comm, &device)?;
        return Ok(0);
    }
    let peer = if options.alone { None } else { nccl::Nccl::new(&comm, &context)? };
    run(options, &comm, &device, peer.as_ref())?;
    Ok(0)
}

/// Path, protocol and blocks of each size, and why.
fn explain(options: &Options, comm: &Comm, device: &DeviceComm) {
    if comm.rank() != 0 {
        return;
    }
    for &operation in &options.operation {
        for task in options.tasks(operation, comm.size()) {
            let why = device.explain(task.collective(), task.count * task.dtype.size());
            println!("{operation:?} of {} bytes: {why}", task.bytes());
        }
    }
}

fn run(options: &Options, comm: &Comm, device: &DeviceComm, peer: Option<&nccl::Nccl>) -> Result<()> {
    let say = |line: String| {
        if comm.rank() == 0 {
            println!("{line}");
        }
    };
    let context = device.context();
    say(format!(
        "{} x {}, {}, {} calls between events, median of {}, {}",
        comm.size(),
        context.name()?,
        options.dtype,
        options.iters,
        options.rounds,
        if options.graph { "one CUDA graph" } else { "plain launches" }
    ));
    match peer {
        Some(peer) => say(format!("NCCL {}", peer.version()?)),
        None if options.alone => {}
        None => say("no NCCL: libnccl.so was not found".to_owned()),
    }
    let stream = context.new_stream()?;
    for &operation in &options.operation {
        let names = options.names();
        say(format!(
            "\n{operation:?}\n| bytes | {} | chosen | busbw GB/s | NCCL us | NCCL registered us | busbw GB/s | NCCL / best |",
            names.join(" | ")
        ));
        say(format!("|{}", "---|".repeat(names.len() + 7)));
        for task in options.tasks(operation, comm.size()) {
            let segment = task.count * task.dtype.size();
            let buffers = task.buffers(&stream, comm.rank(), options.registered.then_some(device))?;
            let timer = timing::Timer {
                comm,
                stream: &stream,
                iters: options.iters,
                rounds: options.rounds,
                graph: options.graph,
            };
            let mut ours = Vec::new();
            for choice in options.ways(segment) {
                device.set_choice(choice);
                if choice.is_some() && choice != Some(device.choice(task.collective(), segment)) {
                    ours.push(f64::NAN);
                    continue;
                }
                ours.push(timer.time(|| ours::enqueue(device, &stream, &task, &buffers))?);
                device.check()?;
            }
            device.set_choice(None);
            let chosen = device.choice(task.collective(), segment);
            let theirs = match peer {
                Some(peer) => timer.time(|| peer.enqueue(&stream, &task, (buffers.input, buffers.output)))?,
                None => f64::NAN,
            };
            let registered = match peer {
                Some(peer) if options.registered => {
                    let windows = peer.windows(&stream, &task, &buffers)?;
                    let [input, output] = windows.each_ref().map(nccl::Window::address);
                    timer.time(|| peer.enqueue(&stream, &task, (input, output)))?
                }
                _ => f64::NAN,
            };
            let plain = theirs;
            let theirs = theirs.min(registered); // of numbers: NAN counts for nothing
            // Of what the library chooses, if that is among them.
            let best = match options.choices.is_empty() {
                true => ours[0],
                false => ours.iter().copied().fold(f64::INFINITY, f64::min),
            };
            let cells: Vec<String> = ours.iter().map(|t| format!("{:.2}", t * 1e6)).collect();
            say(format!(
                "| {} | {} | {}:{} | {:.1} | {:.2} | {:.2} | {:.1} | {:.2} |",
                task.bytes(),
                cells.join(" | "),
                chosen.protocol,
                chosen.blocks,
                task.busbw(best),
                plain * 1e6,
                registered * 1e6,
                task.busbw(theirs),
                theirs / best
            ));
        }
    }
    Ok(())
}
