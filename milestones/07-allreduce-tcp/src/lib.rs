//! Ring all-reduce over one kind of link: draws the schedule, runs it, checks it, counts its bytes, times it, and
//! compares it with the naive way. Milestones 07 (TCP) and 08 (RDMA) share this program.

mod by_hand;
mod cards;
mod links;
mod measure;
mod naive;
#[cfg(test)]
mod on_threads;
mod paper;
mod program;

pub use measure::{Count, loopback_bytes};

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::{CommandFactory, FromArgMatches, Parser};
use program_kit::size;
use replay::Replay;
use tinynccl::algorithm::{self, Shape};
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::schedule::Program;
use tinynccl::schedule::draw::draw;
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Comm, Config, Error, ReduceOp};

/// Ranks that are threads at most, for the links of limited speed.
const THREADS: usize = 16;
/// More ranks than this do not fit on a line.
const DRAWN: usize = 8;

/// The differences between the two milestones.
#[derive(Debug)]
pub struct Over {
    /// Name of the program.
    pub program: &'static str,
    /// The transport of the links.
    pub transport: TransportChoice,
    /// The transport's name for display.
    pub name: &'static str,
    /// The unit of `count`: the heading of its column, and a description.
    pub counted: [&'static str; 2],
    /// Counts the links' traffic.
    pub count: Count,
    /// Runs before any rank starts. The program prints the returned text.
    pub prepare: fn(&Config) -> tinynccl::Result<Option<String>>,
}

/// Ring all-reduce, step by step.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Ranks to start on this machine (default 4). Leave it out under torchrun, mpirun or srun.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    ranks: Option<usize>,
    /// Sizes of the buffer in bytes, comma-separated; K, M and G may follow.
    #[arg(long, value_delimiter = ',', value_parser = size::of_f32(0..=usize::MAX), default_value = "1K,32K,1M,16M")]
    bytes: Vec<usize>,
    /// Size of the buffer in f32 elements, in place of --bytes.
    #[arg(long, conflicts_with = "bytes")]
    count: Option<usize>,
    /// Timed calls per size.
    #[arg(long, default_value_t = 20, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    iters: usize,
    /// Simulates a ring in a good order, and trees, on the machine of this file (docs/topologies), and does no more.
    #[arg(long, value_name = "FILE")]
    machine: Option<std::path::PathBuf>,
    #[command(flatten)]
    replay: Replay,
}

/// The whole program: arguments, ranks, output, exit code.
pub fn main(over: &Over) -> ExitCode {
    let command = Args::command().name(over.program).about(format!("Ring all-reduce over {}, step by step", over.name));
    let args = Args::from_arg_matches(&command.get_matches()).unwrap_or_else(|e| e.exit());
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let done = args.replay.around(launch::is_rank(), || start(over, &args));
    program_kit::exit_code(done, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}

/// Started by a launcher, acts as its rank. Started by hand, runs this program again, once per rank.
fn start(over: &Over, args: &Args) -> Result<i32> {
    if let Some(file) = &args.machine {
        links::show(file)?;
        return Ok(0);
    }
    let mut config = Config::from_env()?;
    config.transport = over.transport;
    config.algorithm = Some(Algorithm::Ring);
    if launch::is_rank() {
        run(over, args, config)?;
        return Ok(0);
    }
    if let Some(text) = (over.prepare)(&config)? {
        println!("{text}");
    }
    let ranks = args.ranks.unwrap_or(4);
    // Input, output and what is received by hand at every rank; the root of the naive way receives a whole buffer.
    let largest = counts(args).into_iter().max().unwrap_or(0) * size_of::<f32>();
    let buffers = largest.saturating_mul(2 * ranks + 2) as u64;
    program_kit::memory::suffices(format_args!("{ranks} ranks"), buffers, "a smaller --bytes, or fewer --ranks,")?;
    let code = Launcher::new(ranks).plain_rank0(true).run_self()?;
    if code == 0 && over.transport == TransportChoice::Tcp && (2..=THREADS).contains(&ranks) {
        cards::table(ranks, &counts(args), args.iters)?;
    }
    Ok(code)
}

fn run(over: &Over, args: &Args, config: Config) -> Result<()> {
    let comm = Comm::from_env_with(config).context("joining the other ranks")?;
    let ranks = comm.size();
    ensure!(
        args.ranks.is_none_or(|r| r == ranks),
        "--ranks {} but the launcher started {ranks}: leave --ranks out",
        args.ranks.unwrap_or_default()
    );
    measure::check_ranks(ranks)?;
    let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: comm.config().channels };
    let programs: Vec<Program> = (0..ranks)
        .map(|rank| algorithm::program(Algorithm::Ring, &shape, rank))
        .collect::<Option<_>>()
        .with_context(|| format!("there is no ring of {ranks} ranks"))?;
    if comm.rank() == 0 {
        explain(over, &programs, &shape)?;
        for way in comm.relayed() {
            println!("{way}\n");
        }
    }
    let counts = counts(args);
    let one_network = measure::one_network(&comm)?;
    if comm.rank() == 0 {
        println!("Sent per rank: payload by the schedule, by the formula 2(n-1)/n S, and {}.\n", over.counted[1]);
        println!(
            "{:>11} | {:>33} | {:>28} | {:>29} |",
            "", "ring: bytes sent per rank", "ring", "naive: through rank 0"
        );
        println!(
            "{:>11} | {:>10} {:>10} {:>11} | {:>9} {:>8} {:>9} | {:>9} {:>8} {:>10} | {:>5}",
            "bytes",
            "schedule",
            "formula",
            over.counted[0],
            "us",
            "algbw",
            "busbw",
            "us",
            "algbw",
            "root sends",
            "ratio"
        );
    }
    // The first calls open links and touch memory, and cores wake up: they are no row's.
    if let Some(&count) = counts.first() {
        warm_up(&comm, count, args.iters)?;
    }
    // The proof takes time in proportion to the cube of the ranks.
    let own = (ranks <= DRAWN).then(|| program::ring(ranks)).transpose().context("the ring as a program is wrong")?;
    for &count in &counts {
        row(over, &comm, &shape, &programs[comm.rank()], count, args.iters, one_network)?;
        if let Some(own) = &own {
            let input = measure::input(&comm, count)?;
            let mut output = measure::buffer(count, |_| 0.0)?;
            measure::verify(&comm, "ring as a program", &mut output, |output| {
                comm.run_program(own, &input, output, ReduceOp::Sum)
            })?;
        }
    }
    if comm.rank() == 0 {
        println!(
            "\nEvery element was checked on every rank: OK. algbw and busbw in GB/s; ratio: naive time / ring time."
        );
    }
    if let (Some(&count), false) = (counts.last(), comm.relayed().is_empty()) {
        forwarded(&comm, count)?;
    }
    comm.close()?;
    Ok(())
}

/// Elements of each size.
fn counts(args: &Args) -> Vec<usize> {
    args.count.map_or_else(|| args.bytes.iter().map(|b| b / 4).collect(), |count| vec![count])
}

/// Calls ring and naive all-reduce `iters` times each, without timing them.
fn warm_up(comm: &Comm, count: usize, iters: usize) -> Result<()> {
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    let mut scratch = measure::buffer(if comm.rank() == 0 { count } else { 0 }, |_| 0.0)?;
    for _ in 0..iters {
        comm.all_reduce(&input, &mut output, ReduceOp::Sum)?;
        naive::all_reduce(comm, &input, &mut output, &mut scratch)?;
    }
    Ok(())
}

/// Prints the number of bytes that each rank forwards between others in one ring call.
fn forwarded(comm: &Comm, count: usize) -> Result<()> {
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    comm.barrier()?;
    let before = comm.census().relayed.bytes;
    comm.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    comm.barrier()?;
    let relayed = [comm.census().relayed.bytes - before];
    let mut all = vec![0u64; comm.size()];
    comm.all_gather(&relayed, &mut all).context("asking the relays")?;
    for (rank, bytes) in all.iter().enumerate().filter(|(_, bytes)| comm.rank() == 0 && **bytes > 0) {
        println!(
            "Rank {rank} forwards {bytes} bytes between others in one ring call of {} bytes.",
            count * size_of::<f32>()
        );
    }
    Ok(())
}

/// Prints the schedule as one rank's program and as the messages of all ranks.
fn explain(over: &Over, programs: &[Program], shape: &Shape) -> Result<()> {
    let ranks = programs.len();
    println!("Ring all-reduce, {ranks} ranks, over {}. The buffer is cut into {ranks} parts.\n", over.name);
    println!("Rank 0's program, as the library executes it:\n");
    for line in draw(&programs[0], 0).to_string().lines() {
        println!("  {line}");
    }
    println!();
    if ranks > DRAWN {
        println!("(the table of all messages is drawn for up to {DRAWN} ranks)\n");
    } else if ranks > 1 {
        let (hops, table) = paper::table(programs, shape).context("the schedule is wrong")?;
        println!("What every rank sends to the next one. p1=0+1: part 1, summed over ranks 0 and 1.\n");
        println!("{table}");
        println!("After {hops} hops, 2(n-1): every rank holds every part's sum.\n");
    }
    Ok(())
}

fn row(
    over: &Over,
    comm: &Comm,
    shape: &Shape,
    program: &Program,
    count: usize,
    iters: usize,
    one_network: bool,
) -> Result<()> {
    let (ranks, bytes) = (comm.size(), count * size_of::<f32>());
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    let mut scratch = measure::buffer(if comm.rank() == 0 { count } else { count.div_ceil(ranks) }, |_| 0.0)?;
    // A machine's counter sees the traffic of its own ranks alone.
    let counter = Some(over.count).filter(|count| one_network || matches!(count, Count::Process(_)));
    let ring = measure::time(comm, iters, "ring", &mut output, counter, |output| {
        comm.all_reduce(&input, output, ReduceOp::Sum)
    })?;
    measure::verify(comm, "ring by hand", &mut output, |output| {
        by_hand::all_reduce(comm, &input, output, &mut scratch)
    })?;
    let naive = measure::time(comm, iters, "naive", &mut output, counter, |output| {
        naive::all_reduce(comm, &input, output, &mut scratch)
    })?;

    // The schedule's bytes. Parts may differ by one element, so ranks may differ a little; this prints the largest.
    let chunk = match over.transport {
        TransportChoice::Verbs => comm.config().verbs_chunk,
        _ => comm.config().tcp_chunk,
    };
    let partition = program.partition(count, size_of::<f32>(), chunk);
    let planned = (0..ranks).filter_map(|r| algorithm::bytes_sent(Algorithm::Ring, shape, r, &partition)).max();
    let factor = 2.0 * (ranks as f64 - 1.0) / ranks as f64;
    let gb_per_s = |seconds: f64| if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
    if comm.rank() == 0 {
        println!(
            "{bytes:>11} | {:>10} {:>10.0} {:>11} | {:>9.1} {:>8.3} {:>9.3} | {:>9.1} {:>8.3} {:>10} | {:>5.2}",
            planned.unwrap_or_default(),
            factor * bytes as f64,
            ring.counted.map_or("-".to_owned(), |b| format!("{b:.0}")),
            ring.seconds * 1e6,
            gb_per_s(ring.seconds),
            gb_per_s(ring.seconds) * factor,
            naive.seconds * 1e6,
            gb_per_s(naive.seconds),
            naive::root_bytes(ranks, bytes),
            naive.seconds / ring.seconds,
        );
    }
    Ok(())
}
