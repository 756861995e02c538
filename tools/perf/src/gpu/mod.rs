//! Collectives on GPUs beside NCCL's. One process per GPU; both libraries in the same processes, in turn at each size.
//!
//! Two CUDA events time `--iters` calls back to back. A time is the median over `--rounds` of the slowest rank's mean.
//! NCCL is loaded as `libnccl.so` (put a folder with such a link into LD_LIBRARY_PATH); without it our library runs
//! alone.

mod hosted;
mod nccl;
mod task;
mod timing;

use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use clap::Parser;
use cudarc::driver::{CudaContext, CudaStream};
use tinynccl::bootstrap::Server;
use tinynccl::config::CudaPath;
use tinynccl::cuda::{self, Choice, DeviceComm, Framing, Path, Protocol};
use tinynccl::launch::{self, Launcher};
use tinynccl::wire::Collective;
use tinynccl::{Comm, Config, DType, Error, ReduceOp};

use crate::table;
use nccl::{Nccl, Window};
use task::Task;

/// Times collectives on GPUs, beside NCCL: one process per GPU.
#[derive(Debug, Parser)]
pub(crate) struct Options {
    /// Ranks to start, one per GPU; 0: as many as there are GPUs.
    #[arg(long, default_value_t = 0)]
    ranks: usize,
    /// Ranks of each process, as threads that share its GPU. NCCL takes one rank per GPU: needs --alone.
    #[arg(long, default_value_t = 1, requires = "alone")]
    threads: usize,
    /// Operations to measure, in nccl-tests' sense: all-reduce, all-gather, reduce-scatter, broadcast, reduce,
    /// all-to-all; gather (to rank 0; bytes are those of its output), scatter (from rank 0; bytes are those of its
    /// input); send-recv (each rank sends to the next and receives from the one before).
    #[arg(long, value_delimiter = ',', default_value = "all-reduce", value_parser = operation)]
    operation: Vec<Collective>,
    /// Element type (f32 or bf16).
    #[arg(short, long, default_value = "f32")]
    dtype: DType,
    /// Operator of reductions (NCCL's is always sum).
    #[arg(short = 'o', long, default_value = "sum")]
    op: ReduceOp,
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
    /// Measurements of each size.
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Launches the calls as one CUDA graph.
    #[arg(long)]
    graph: bool,
    /// Path of the data (auto, peer, hosted or hosts); overrides TINYNCCL_CUDA_PATH. For the hosted path on one host the
    /// table has the times of its stages instead of NCCL's; ranks may then share GPUs.
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
    /// Protocols to time: `auto` is the library's choice; `one-shot:8`, `two-shot:32` (LL), `one-shot-128:8`,
    /// `two-shot-128:32` (LL128), `simple:64` and `direct:128` have blocks behind them; so have schedules, as `ring:64`
    /// (protocol Simple), `ring-ll:16` and `ring-128:64`, or blocks by size, as `ring`.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    choices: Vec<Way>,
}

/// A way to make a call: the library's choice, or a protocol with blocks, or with blocks by size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way(Option<(Protocol, Option<u32>)>);

impl FromStr for Way {
    type Err = String;
    fn from_str(text: &str) -> Result<Way, String> {
        let read = || {
            let (name, blocks) = match text.split_once(':') {
                Some((name, blocks)) => (name, Some(blocks.parse().ok()?)),
                None => (text, None),
            };
            let protocol = match name {
                "one-shot" => Protocol::OneShot,
                "two-shot" => Protocol::TwoShot,
                "one-shot-128" => Protocol::OneShot128,
                "two-shot-128" => Protocol::TwoShot128,
                "simple" => Protocol::Simple,
                "direct" => Protocol::Direct,
                _ => {
                    let framings = [("-ll", Framing::Ll), ("-128", Framing::Ll128), ("", Framing::Simple)];
                    let named = |&(end, framing)| Some((name.strip_suffix(end)?.parse().ok()?, framing));
                    let (algorithm, framing) = framings.iter().find_map(named)?;
                    return Some((Protocol::Schedule(algorithm, framing), blocks));
                }
            };
            blocks.map(|blocks| (protocol, Some(blocks)))
        };
        match text {
            "auto" => Ok(Way(None)),
            _ => read()
                .map(|way| Way(Some(way)))
                .ok_or_else(|| format!("expected auto, ring or simple:64, got {text:?}")),
        }
    }
}

impl Way {
    /// Choice to set for a call of `bytes`; `None` leaves it to the library.
    fn choice(self, bytes: usize) -> Option<Choice> {
        let (protocol, blocks) = self.0?;
        Some(Choice { protocol, blocks: blocks.unwrap_or_else(|| protocol.blocks(bytes)) })
    }

    fn name(self) -> String {
        match self.0 {
            None => "tinynccl us".to_owned(),
            Some((protocol, None)) => format!("{protocol} us"),
            Some((protocol, Some(blocks))) => format!("{protocol}:{blocks}"),
        }
    }
}

/// Reads `all-reduce`.
fn operation(text: &str) -> Result<Collective, String> {
    use Collective::{Barrier, Scan};
    let mut measured = Collective::ALL.into_iter().filter(|c| !matches!(c, Barrier | Scan));
    let found = measured.find(|collective| collective.name().replace(['_', '/'], "-") == text);
    found.ok_or_else(|| "expected one of those that --help lists".to_owned())
}

/// One rank and its GPU.
struct Bench<'a> {
    options: &'a Options,
    comm: &'a Comm,
    device: DeviceComm,
    /// All work is in this one.
    stream: Arc<CudaStream>,
}

pub(crate) fn run(options: &Options) -> Result<i32> {
    // Before the ranks start, so that an error appears once.
    let gpus = cuda::device_count()?;
    if gpus == 0 {
        return Err(Error::Unsupported { what: "CUDA".to_owned(), detail: "the driver sees no GPU".to_owned() }.into());
    }
    if !launch::is_rank() {
        let ranks = if options.ranks == 0 { gpus } else { options.ranks };
        return Ok(Launcher::new(ranks).plain_rank0(true).run_self()?);
    }
    let mut config = Config::from_env()?;
    config.cuda_path = options.path.unwrap_or(config.cuda_path);
    let comm = Comm::from_env_with(config.clone())?;
    let context = CudaContext::new(comm.local_rank() % gpus).context("cannot open this rank's GPU")?;
    // One stream runs all work in order, so no event between calls is needed.
    // SAFETY: all memory here is used in one stream.
    unsafe { context.disable_event_tracking() };
    if options.threads == 1 {
        return measure(options, &comm, &context).map(|()| 0);
    }
    let size = comm.size() * options.threads;
    let server = match comm.rank() {
        0 => Some(Server::start("127.0.0.1:0".parse()?, size, &config)?),
        _ => None,
    };
    let ids: Vec<Option<String>> =
        comm.exchange("perf: id", &server.as_ref().map(|server| server.unique_id().to_string()))?;
    let id = ids.into_iter().flatten().next().context("rank 0 has no rendezvous")?.parse()?;
    std::thread::scope(|scope| {
        let rank = |thread: usize| {
            let (id, config, first) = (&id, config.clone(), comm.rank() * options.threads);
            let context = &context;
            scope.spawn(move || measure(options, &Comm::init(id, first + thread, size, config)?, context))
        };
        let threads: Vec<_> = (0..options.threads).map(rank).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a rank's thread panicked"))?)
    })?;
    // The ranks of the first process meet the others at its rendezvous.
    comm.barrier()?;
    Ok(0)
}

/// One rank.
fn measure(options: &Options, comm: &Comm, context: &Arc<CudaContext>) -> Result<()> {
    let device = DeviceComm::new(comm, context)?;
    let bench = Bench { options, comm, device, stream: context.new_stream()? };
    if options.explain {
        bench.explain();
    } else if bench.device.path() == Path::Hosted && comm.is_one_host() {
        bench.stages()?;
    } else {
        let peer = if options.alone { None } else { Nccl::new(comm, context)? };
        bench.compare(peer.as_ref())?;
    }
    Ok(())
}

impl Bench<'_> {
    /// Prints a line of rank 0's.
    fn say(&self, line: &str) {
        if self.comm.rank() == 0 {
            println!("{line}");
        }
    }

    /// An operation of every size that can be cut into the segments.
    fn tasks(&self, collective: Collective) -> impl Iterator<Item = Task> {
        let Options { begin, end, factor, dtype, op, .. } = *self.options;
        let sizes = std::iter::successors(Some(begin), move |bytes| bytes.checked_mul(factor));
        let (sizes, ranks) = (sizes.take_while(move |&bytes| bytes <= end), self.comm.size());
        sizes.filter_map(move |bytes| Some(Task { op, ..Task::new(collective, dtype, bytes, ranks)? }))
    }

    /// Path, protocol and blocks of each size, and why.
    fn explain(&self) {
        for &operation in &self.options.operation {
            for task in self.tasks(operation) {
                let why = self.device.explain(operation, task.segment());
                self.say(&format!("{operation:?} of {} bytes: {why}", task.bytes));
            }
        }
    }

    /// A table of times for each operation.
    fn compare(&self, peer: Option<&Nccl>) -> Result<()> {
        let Options { dtype, iters, rounds, .. } = self.options;
        let launches = if self.options.graph { "one CUDA graph" } else { "plain launches" };
        let (ranks, gpu) = (self.comm.size(), self.device.context().name()?);
        self.say(&format!("path {} ({})", self.device.path(), self.device.path_reason()));
        self.say(&format!("{ranks} x {gpu}, {dtype}, {iters} calls between events, median of {rounds}, {launches}"));
        match peer {
            Some(peer) => self.say(&format!("NCCL {}", peer.version()?)),
            None if self.options.alone => {}
            None => self.say("no NCCL: libnccl.so was not found"),
        }
        let last = ["chosen", "busbw GB/s", "NCCL us", "NCCL registered us", "busbw GB/s", "NCCL / best"];
        let names = std::iter::once("bytes".to_owned()).chain(self.options.choices.iter().map(|way| way.name()));
        let head = table::head(&names.chain(last.map(str::to_owned)).collect::<Vec<_>>());
        for &operation in &self.options.operation {
            self.say(&format!("\n{operation:?}\n{head}"));
            for task in self.tasks(operation) {
                let row = self.row(&task, peer)?;
                self.say(&table::row(&row));
            }
        }
        Ok(())
    }

    fn row(&self, task: &Task, peer: Option<&Nccl>) -> Result<Vec<String>> {
        let (device, stream) = (&self.device, &self.stream);
        let buffers = task.buffers(stream, self.comm.rank(), self.options.registered.then_some(device))?;
        let mut ours = Vec::new();
        for way in &self.options.choices {
            let choice = way.choice(task.segment());
            device.set_choice(choice);
            if choice.is_some() && choice != Some(device.choice(task.collective, task.segment())) {
                ours.push(f64::NAN);
                continue;
            }
            ours.push(self.time(|| task.enqueue(device, stream, &buffers))?);
            device.check()?;
        }
        device.set_choice(None);
        let chosen = device.choice(task.collective, task.segment());
        let (mut plain, mut registered) = (f64::NAN, f64::NAN);
        if let Some(peer) = peer {
            plain = self.time(|| peer.enqueue(stream, task, buffers.addresses))?;
            if self.options.registered {
                let windows = peer.windows(stream, task, &buffers)?;
                registered = self.time(|| peer.enqueue(stream, task, windows.each_ref().map(Window::address)))?;
            }
        }
        let theirs = plain.min(registered); // of numbers: NAN counts for nothing
        // The library's own choice counts, if it is among them.
        let auto = self.options.choices.iter().position(|way| way.0.is_none());
        let best = auto.map_or_else(|| ours.iter().copied().fold(f64::INFINITY, f64::min), |auto| ours[auto]);
        let mut cells = vec![task.bytes.to_string()];
        cells.extend(ours.iter().map(|time| format!("{:.2}", time * 1e6)));
        let chooses = device.path().chooses();
        cells.extend([
            if chooses { format!("{}:{}", chosen.protocol, chosen.blocks) } else { "-".to_owned() },
            format!("{:.1}", task.busbw(best)),
            format!("{:.2}", plain * 1e6),
            format!("{:.2}", registered * 1e6),
            format!("{:.1}", task.busbw(theirs)),
            format!("{:.2}", theirs / best),
        ]);
        Ok(cells)
    }
}
