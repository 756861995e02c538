//! Latency and bandwidth of messages over RDMA between two ranks, in the manner of perftest's `ib_write_lat` and
//! `ib_write_bw`, and of the kernel's sockets beside them.
//!
//! `scripts/compare-perftest` runs it beside them. It starts its own two ranks; rank 0 sends the stream, and prints one
//! line: `LEVEL,WHAT,BYTES,ITERATIONS,VALUE`, where the value is MiB/s (`bw`) or the median of half a round trip in µs
//! (`lat`).

mod comm;
mod link;
mod socket;

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use program_kit::{Usage, memory};
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Config, transport};

use crate::messages::{self, Messages};
use crate::table::word;

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
    /// A TCP connection of the kernel's, over loopback: no RDMA.
    Tcp,
    /// Datagrams, over loopback: no RDMA, and latency alone.
    Udp,
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

impl Waiting {
    /// Between two looks; sleeping is up to who looks.
    fn turn(self) {
        if self == Waiting::Yield { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

/// Latency or bandwidth of messages over RDMA between two ranks, in perftest's manner.
#[derive(Debug, Parser)]
pub(crate) struct Options {
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

pub(crate) fn run(options: &Options) -> Result<i32> {
    let mut config = Config::from_env()?;
    let rdma = !matches!(options.level, Level::Tcp | Level::Udp);
    if !launch::is_rank() {
        if options.level == Level::Udp && (options.what == What::Bw || options.bytes > socket::DATAGRAM) {
            let most = socket::DATAGRAM;
            return Err(Usage(format!("udp: expected lat, as a stream loses datagrams, and -s {most} at most")).into());
        }
        // Before the ranks start, so that a machine without a device says so once.
        if rdma {
            transport::rdma_ports(&config)?;
        }
        // What is sent and what is received.
        memory::suffices("2 ranks", options.bytes.saturating_mul(4) as u64, "a smaller --bytes")?;
        return Ok(Launcher::new(2).plain_rank0(true).run_self()?);
    }
    if rdma {
        config.transport = TransportChoice::Verbs;
    }
    match options.wait {
        Waiting::Poll => config.spin = Duration::from_secs(10),
        Waiting::Yield => {}
        Waiting::Events => config.spin = Duration::ZERO,
    }
    let rank: usize = std::env::var("RANK").context("RANK")?.parse().context("RANK")?;
    if let Some(device) = options.devices.get(rank) {
        config.verbs_device = Some(device.clone());
    }
    let comm = Comm::from_env_with(config.clone())?;
    let value = measure(&comm, &config, options).inspect_err(|error| comm.abort(&format!("{error:#}")))?;
    if rank == 0 {
        let (level, what) = (word(options.level), word(options.what));
        println!("{level},{what},{},{},{value:.3}", options.bytes, options.iters);
    }
    comm.close()?;
    Ok(0)
}

fn measure(comm: &Comm, config: &Config, options: &Options) -> Result<f64> {
    let mut end: Box<dyn Messages + '_> = match options.level {
        Level::Comm | Level::Registered | Level::Registering => Box::new(comm::Rank::new(comm, options)?),
        Level::Link | Level::InPlace => Box::new(link::Wire::new(comm, config, options)?),
        Level::Tcp | Level::Udp => Box::new(socket::Socket::new(comm, options)?),
    };
    let measured = match options.what {
        What::Bw => messages::rate,
        What::Lat => messages::half_round_trip,
    };
    let value = measured(&mut *end, comm.rank() == 0, options.bytes, options.iters)?;
    // Neither end closes before the other is done.
    comm.barrier()?;
    Ok(value)
}
