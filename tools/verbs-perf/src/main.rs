//! Latency and bandwidth of messages over RDMA between two ranks, in the manner of perftest's `ib_write_lat` and
//! `ib_write_bw`.
//!
//! `scripts/compare-perftest` runs it beside them. It starts its own two ranks; rank 0 sends the stream, and prints one
//! line: `LEVEL,WHAT,BYTES,ITERATIONS,VALUE`, where the value is MiB/s (`bw`) or the median of half a round trip in µs
//! (`lat`).

mod comm;
mod link;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use program_kit::stats::median;
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Config};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Level {
    /// One message of a link after the other, as perftest does; the payload stays in registered memory.
    InPlace,
    /// One message of a link after the other, from and to memory of the caller: a copy on each side.
    Link,
    /// `Comm::send` and `Comm::recv`.
    Comm,
    /// `Comm::send` and `Comm::recv`, sent from memory that is registered with the device (zero copy).
    Registered,
    /// `Comm::send` and `Comm::recv`, from memory that is registered before and deregistered after each call: the cost
    /// for a library without a registration cache.
    Registering,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// A stream from rank 0 to rank 1, until rank 1 confirms that it has all of it.
    Bw,
    /// Round trips of one message.
    Lat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Waiting {
    /// Polls the device, as perftest does.
    Poll,
    /// Polls the device and yields the core in between. A communicator waits by its settings (`TINYNCCL_SPIN`).
    Yield,
    /// Sleeps until a completion event arrives.
    Events,
}

/// Latency or bandwidth of messages over RDMA between two ranks.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Level of the API.
    #[arg(value_enum)]
    level: Level,
    #[arg(value_enum)]
    what: What,
    /// Length of a message.
    #[arg(short = 's', long, default_value_t = 65536)]
    bytes: usize,
    /// Messages of the stream, or round trips.
    #[arg(short = 'n', long, default_value_t = 1000)]
    iters: usize,
    /// RDMA devices of rank 0 and of rank 1.
    #[arg(short = 'd', long, value_delimiter = ',')]
    devices: Vec<String>,
    /// Method by which a rank waits.
    #[arg(short = 'w', long, value_enum, default_value = "poll")]
    wait: Waiting,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    program_kit::exit_code(run(&Args::parse()), |_| false)
}

fn run(args: &Args) -> Result<i32> {
    if !launch::is_rank() {
        // What is sent and what is received.
        program_kit::memory::suffices("2 ranks", args.bytes.saturating_mul(4) as u64, "a smaller --bytes")?;
        return Ok(Launcher::new(2).plain_rank0(true).run_self()?);
    }
    let rank: usize = std::env::var("RANK").context("RANK")?.parse().context("RANK")?;
    let mut config = Config::from_env()?;
    config.transport = TransportChoice::Verbs;
    if let Some(device) = args.devices.get(rank) {
        config.verbs_device = Some(device.clone());
    }
    match args.wait {
        Waiting::Poll => config.spin = Duration::from_secs(10),
        Waiting::Yield => {}
        Waiting::Events => config.spin = Duration::ZERO,
    }
    let comm = Comm::from_env_with(config.clone())?;
    let rank_is_first = rank == 0;
    let measured = match args.level {
        Level::Comm | Level::Registered | Level::Registering => {
            comm::Rank::new(&comm, args).and_then(|mut rank| measure(&mut rank, rank_is_first, args))
        }
        Level::Link | Level::InPlace => link::Wire::new(&comm, &config, args).and_then(|mut wire| {
            let value = measure(&mut wire, rank_is_first, args)?;
            // Neither end closes the link before the other is done.
            comm.barrier()?;
            Ok(value)
        }),
    };
    let value = measured.inspect_err(|error| comm.abort(&format!("{error:#}")))?;
    if rank == 0 {
        let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|v| v.get_name().to_owned()).unwrap_or_default()
        };
        let (level, what) = (name(&|| args.level.to_possible_value()), name(&|| args.what.to_possible_value()));
        println!("{level},{what},{},{},{value:.3}", args.bytes, args.iters);
    }
    comm.close()?;
    Ok(0)
}

/// Messages between two ranks.
trait Messages {
    /// Sends the data.
    fn send(&mut self) -> Result<()>;
    /// Receives as much.
    fn recv(&mut self) -> Result<()>;
    /// Sends a byte.
    fn signal(&mut self) -> Result<()>;
    /// Receives it.
    fn await_signal(&mut self) -> Result<()>;
}

/// MiB/s of a stream, or µs of half a round trip: the median, which perftest calls typical.
fn measure(messages: &mut impl Messages, first: bool, args: &Args) -> Result<f64> {
    let warm_up = args.iters / 10;
    if args.what == What::Bw {
        stream(messages, first, warm_up + 1)?;
        let time = stream(messages, first, args.iters)?;
        return Ok((args.bytes * args.iters) as f64 / time.as_secs_f64() / f64::from(1 << 20));
    }
    let mut times = Vec::with_capacity(args.iters);
    for _ in 0..args.iters + warm_up {
        let start = Instant::now();
        if first {
            messages.send()?;
        }
        messages.recv()?;
        if !first {
            messages.send()?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
    }
    Ok(median(&times[warm_up..]).unwrap_or(f64::NAN))
}

/// The time of `n` messages, from when both ranks are ready until the second has all of them.
fn stream(messages: &mut impl Messages, first: bool, n: usize) -> Result<Duration> {
    let signal = |messages: &mut dyn Messages| if first { messages.await_signal() } else { messages.signal() };
    signal(messages)?;
    let start = Instant::now();
    for _ in 0..n {
        if first { messages.send()? } else { messages.recv()? }
    }
    signal(messages)?;
    Ok(start.elapsed())
}
