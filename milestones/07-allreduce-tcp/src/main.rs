//! Milestone 07: ring all-reduce over TCP. It draws the schedule, runs it, checks it, counts its bytes, times it, and
//! compares it with the naive way.

mod by_hand;
mod cards;
mod in_chunks;
mod links;
mod naive;
mod paper;
mod program;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use course_kit::measure::{self, Count, Sizes};
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

/// Ring all-reduce over TCP, step by step.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    sizes: Sizes,
    /// Times the ring by hand with each part cut into so many chunks, comma-separated, and does no more.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    chunks: Vec<usize>,
    /// Only simulate a ring in a good order, and trees, on the machine of this file (docs/topologies).
    #[arg(long, value_name = "FILE")]
    machine: Option<std::path::PathBuf>,
    #[command(flatten)]
    replay: Replay,
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let done = args.replay.around(launch::is_rank(), || start(&args));
    program_kit::exit_code(done, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}

/// Started by a launcher, acts as its rank. Started by hand, runs this program again, once per rank.
fn start(args: &Args) -> Result<i32> {
    if let Some(file) = &args.machine {
        links::show(file)?;
        return Ok(0);
    }
    let mut config = Config::from_env()?;
    config.transport = TransportChoice::Tcp;
    config.algorithm = Some(Algorithm::Ring);
    if launch::is_rank() {
        let comm = measure::join(config, args.sizes.ranks)?;
        match args.chunks.as_slice() {
            [] => run(&comm, &args.sizes)?,
            chunks => in_chunks::table(&comm, &args.sizes.counts(), chunks, args.sizes.iters)?,
        }
        comm.close()?;
        return Ok(0);
    }
    // What is received by hand: a part at every rank, two in chunks. The root of the naive way receives a whole buffer.
    let ranks = args.sizes.ranks(3)?;
    let code = Launcher::new(ranks).plain_rank0(true).run_self()?;
    if code == 0 && args.chunks.is_empty() && (2..=THREADS).contains(&ranks) {
        cards::table(ranks, &args.sizes.counts(), args.sizes.iters)?;
    }
    Ok(code)
}

fn run(comm: &Comm, sizes: &Sizes) -> Result<()> {
    let ranks = comm.size();
    let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: comm.config().channels };
    let programs: Vec<Program> = (0..ranks)
        .map(|rank| algorithm::program(Algorithm::Ring, &shape, rank))
        .collect::<Option<_>>()
        .with_context(|| format!("there is no ring of {ranks} ranks"))?;
    if comm.rank() == 0 {
        explain(&programs, &shape)?;
        for way in comm.relayed() {
            println!("{way}\n");
        }
    }
    let counts = sizes.counts();
    let one_network = measure::one_network(comm)?;
    if comm.rank() == 0 {
        println!(
            "Sent per rank: payload by the schedule, by the formula 2(n-1)/n S, and by the kernel's loopback counter.\n"
        );
        println!(
            "{:>11} | {:>33} | {:>28} | {:>29} |",
            "", "ring: bytes sent per rank", "ring", "naive: through rank 0"
        );
        println!(
            "{:>11} | {:>10} {:>10} {:>11} | {:>9} {:>8} {:>9} | {:>9} {:>8} {:>10} | {:>5}",
            "bytes", "schedule", "formula", "counted", "us", "algbw", "busbw", "us", "algbw", "root sends", "ratio"
        );
    }
    // The first calls open links and touch memory, and cores wake up: they are no row's.
    if let Some(&count) = counts.first() {
        warm_up(comm, count, sizes.iters)?;
    }
    // The proof takes time in proportion to the cube of the ranks.
    let own = (ranks <= DRAWN).then(|| program::ring(ranks)).transpose().context("the ring as a program is wrong")?;
    for &count in &counts {
        row(comm, &shape, &programs[comm.rank()], count, sizes.iters, one_network)?;
        if let Some(own) = &own {
            let input = measure::input(comm, count)?;
            let mut output = measure::buffer(count, |_| 0.0)?;
            measure::verify(comm, "ring as a program", &mut output, |output| {
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
        measure::forwarded(comm, count)?;
    }
    Ok(())
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

/// Prints the schedule as one rank's program and as the messages of all ranks.
fn explain(programs: &[Program], shape: &Shape) -> Result<()> {
    let ranks = programs.len();
    println!("Ring all-reduce, {ranks} ranks, over TCP. The buffer is cut into {ranks} parts.\n");
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

fn row(comm: &Comm, shape: &Shape, program: &Program, count: usize, iters: usize, one_network: bool) -> Result<()> {
    let (ranks, bytes) = (comm.size(), count * size_of::<f32>());
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    let mut scratch = measure::buffer(if comm.rank() == 0 { count } else { count.div_ceil(ranks) }, |_| 0.0)?;
    // The machine's counter sees the traffic of its own ranks alone.
    let counter = one_network.then_some(Count::Machine(loopback_bytes));
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
    let partition = program.partition(count, size_of::<f32>(), comm.config().tcp_chunk);
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

/// Bytes that the kernel has sent over the loopback interface, including headers.
fn loopback_bytes() -> Option<u64> {
    std::fs::read_to_string("/sys/class/net/lo/statistics/tx_bytes").ok()?.trim().parse().ok()
}
