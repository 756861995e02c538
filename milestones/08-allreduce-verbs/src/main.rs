//! Milestone 08: ring all-reduce over RDMA: checked, timed, and its packets counted by the devices.

#[cfg(any(feature = "verbs", test))]
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use course_kit::measure::{self, Count, Sizes};
use replay::Replay;
use tinynccl::algorithm::{self, Shape};
use tinynccl::config::TransportChoice;
use tinynccl::launch::{self, Launcher};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Comm, Config, Error, ReduceOp};

/// Ring all-reduce over RDMA.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    sizes: Sizes,
    #[command(flatten)]
    replay: Replay,
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let done = args.replay.around(launch::is_rank(), || start(&args.sizes));
    program_kit::exit_code(done, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}

/// Started by a launcher, acts as its rank. Started by hand, runs this program again, once per rank.
fn start(sizes: &Sizes) -> Result<i32> {
    let mut config = Config::from_env()?;
    let ports = configure(&mut config)?;
    if launch::is_rank() {
        run(sizes, config)?;
        return Ok(0);
    }
    println!("{ports}");
    Ok(Launcher::new(sizes.ranks(0)?).plain_rank0(true).run_self()?)
}

/// Chooses the transport and the algorithm, and lists the ports that the ranks may use.
// EXERCISE 1 (How it works): links over RDMA and over nothing else, and the ring. Return a heading and a line for each
// port of this machine that the ranks may use.
fn configure(config: &mut Config) -> tinynccl::Result<String> {
    config.transport = TransportChoice::Verbs;
    config.algorithm = Some(Algorithm::Ring);
    let ports = tinynccl::transport::rdma_ports(config)?;
    let list: Vec<String> = ports.iter().map(|p| format!("  {p}\n")).collect();
    Ok(format!("RDMA ports of this machine that the ranks may use:\n{}", list.concat()))
}

fn run(sizes: &Sizes, config: Config) -> Result<()> {
    let comm = measure::join(config, sizes.ranks)?;
    let first = comm.rank() == 0;
    let one_network = measure::one_network(&comm)?;
    if first {
        println!("Ring all-reduce, {} ranks, over RDMA.\n", comm.size());
        for way in comm.relayed() {
            println!("{way}\n");
        }
        println!(
            "Sent per rank: payload by the schedule, by the formula 2(n-1)/n S, and in packets, acknowledgements \
             included, by the devices' counters.\n"
        );
        println!(
            "{:>11} | {:>10} {:>10} {:>11} | {:>9} {:>8} {:>9}",
            "bytes", "schedule", "formula", "packets", "us", "algbw", "busbw"
        );
    }
    let counts = sizes.counts();
    // The first calls open links and touch memory: they are no row's.
    if let Some(&count) = counts.first() {
        let input = measure::input(&comm, count)?;
        let mut output = measure::buffer(count, |_| 0.0)?;
        (0..sizes.iters).try_for_each(|_| comm.all_reduce(&input, &mut output, ReduceOp::Sum))?;
    }
    for &count in &counts {
        row(&comm, count, sizes.iters, one_network)?;
    }
    if first {
        println!("\nEvery element was checked on every rank: OK. algbw and busbw in GB/s.");
    }
    if let (Some(&count), false) = (counts.last(), comm.relayed().is_empty()) {
        measure::forwarded(&comm, count)?;
    }
    Ok(comm.close()?)
}

/// Checks and times one size, and prints its line.
fn row(comm: &Comm, count: usize, iters: usize, one_network: bool) -> Result<()> {
    let (ranks, bytes) = (comm.size(), count * size_of::<f32>());
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    #[cfg(feature = "verbs")]
    let packets = Count::Machine(|| packets(Path::new("/sys/class/infiniband")));
    #[cfg(not(feature = "verbs"))]
    let packets = Count::Process(|| softroce::counters().sent_pkts);
    // A machine's counter sees the traffic of its own ranks alone.
    let counter = Some(packets).filter(|count| one_network || matches!(count, Count::Process(_)));
    let ring = measure::time(comm, iters, "ring", &mut output, counter, |output| {
        comm.all_reduce(&input, output, ReduceOp::Sum)
    })?;

    // The schedule's bytes. Parts may differ by one element, so ranks may differ a little; this prints the largest.
    let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: comm.config().channels };
    let program = algorithm::program(Algorithm::Ring, &shape, comm.rank()).context("there is no such ring")?;
    let partition = program.partition(count, size_of::<f32>(), comm.config().verbs_chunk);
    let planned = (0..ranks).filter_map(|r| algorithm::bytes_sent(Algorithm::Ring, &shape, r, &partition)).max();
    let factor = 2.0 * (ranks as f64 - 1.0) / ranks as f64;
    let algbw = if ring.seconds > 0.0 { bytes as f64 / ring.seconds / 1e9 } else { 0.0 };
    if comm.rank() == 0 {
        println!(
            "{bytes:>11} | {:>10} {:>10.0} {:>11} | {:>9.1} {algbw:>8.3} {:>9.3}",
            planned.unwrap_or_default(),
            factor * bytes as f64,
            ring.counted.map_or("-".to_owned(), |packets| format!("{packets:.0}")),
            ring.seconds * 1e6,
            algbw * factor,
        );
    }
    Ok(())
}

/// Packets that all RDMA ports below `devices` have sent. Software devices and adapters count in different places.
// EXERCISE 2 (Expected output): wait until the counters are fresh, then add up the packets sent by every port of every
// device: hw_counters/sent_pkts, or counters/port_xmit_packets. None when there is no port.
#[cfg(any(feature = "verbs", test))]
fn packets(devices: &Path) -> Option<u64> {
    // The kernel refreshes a device's counters once per interval (`hw_counters/lifespan`, 10 ms) and returns cached
    // values in between.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let mut sum = None;
    for device in std::fs::read_dir(devices).ok()?.flatten() {
        for port in std::fs::read_dir(device.path().join("ports")).ok()?.flatten() {
            let read = |name: &str| std::fs::read_to_string(port.path().join(name)).ok()?.trim().parse::<u64>().ok();
            let sent = read("hw_counters/sent_pkts").or_else(|| read("counters/port_xmit_packets"))?;
            sum = Some(sum.unwrap_or(0) + sent);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ports_are_added_wherever_their_counters_are() {
        let devices = tempfile::tempdir().unwrap();
        assert_eq!(packets(devices.path()), None, "no device");
        assert_eq!(packets(&devices.path().join("none")), None, "no folder");
        for (name, packets) in [
            ("rxe0/ports/1/hw_counters/sent_pkts", "5\n"),
            ("mlx5_0/ports/1/counters/port_xmit_packets", "70\n"),
            ("mlx5_0/ports/2/counters/port_xmit_packets", "900\n"),
        ] {
            let file = devices.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, packets).unwrap();
        }
        assert_eq!(packets(devices.path()), Some(975));
    }
}
