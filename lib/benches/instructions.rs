//! Instructions of a call apart from waiting: one thread makes the calls of both of two ranks.
//!
//! An all_reduce is done as its two halves, a reduce to rank 0 and a broadcast from it: the receiver is called after the
//! sender, so no call ever waits, and the number of instructions is the same in every run. `scripts/instructions.sh`
//! counts them under callgrind, per case, and compares them with the recorded ones. Without valgrind this prints
//! nanoseconds:
//! ```text
//! cargo bench -p tinynccl --bench instructions -- CASE ROUNDS
//! ```
//! A case is where messages go (`inproc`, `shm`, `tcp`, or `region`, the memory that all ranks share) and what is
//! reduced (`8`, `64K`, or `group`: four calls of 8 bytes at once). `TINYNCCL_TRACE=FILE` shows what recording adds.

use std::time::Instant;

use tinynccl::bootstrap::Server;
use tinynccl::config::{TransportChoice, Tune};
use tinynccl::{Comm, Config, ReduceOp, Result};

/// Not inlined, so that callgrind finds it.
#[inline(never)]
fn all_reduces(comms: &[Comm], (zero, one): (&mut [f64], &mut [f64]), rounds: usize) -> Result<()> {
    for _ in 0..rounds {
        comms[1].reduce_in_place(one, ReduceOp::Max, 0)?;
        comms[0].reduce_in_place(zero, ReduceOp::Max, 0)?;
        comms[0].broadcast_in_place(zero, 0)?;
        comms[1].broadcast_in_place(one, 0)?;
    }
    Ok(())
}

/// The same for groups of four calls.
#[inline(never)]
fn all_reduces_grouped(comms: &[Comm], (zero, one): (&mut [f64], &mut [f64]), rounds: usize) -> Result<()> {
    for _ in 0..rounds {
        for (rank, buffer) in [(1, &mut *one), (0, &mut *zero)] {
            comms[rank].group(|group| {
                buffer.chunks_mut(1).try_for_each(|each| group.reduce_in_place(each, ReduceOp::Max, 0))
            })?;
        }
        for (rank, buffer) in [(0, &mut *zero), (1, &mut *one)] {
            comms[rank].group(|group| buffer.chunks_mut(1).try_for_each(|each| group.broadcast_in_place(each, 0)))?;
        }
    }
    Ok(())
}

/// Two ranks of this process whose messages go over `transport`.
fn ranks(transport: &str, mut config: Config) -> Result<Vec<Comm>> {
    config.transport = match transport {
        "tcp" => TransportChoice::Tcp,
        "shm" => TransportChoice::Shm,
        _ => TransportChoice::Auto,
    };
    // Prices that are measured would differ from run to run.
    config.tune = Tune::Off;
    if transport != "region" {
        config.one_shot = 0;
    }
    if config.transport == TransportChoice::Auto {
        return Comm::threads(2, config);
    }
    let server = Server::start((std::net::Ipv4Addr::LOCALHOST, 0).into(), 2, &config)?;
    let id = server.unique_id();
    let join = |rank| Comm::init(&id, rank, 2, config.clone());
    let comms = std::thread::scope(|scope| {
        let one = scope.spawn(|| join(1));
        Ok(vec![join(0)?, one.join().expect("no rank panics")?])
    });
    // It outlives its ranks, and the process ends soon.
    std::mem::forget(server);
    comms
}

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let case = arguments.first().map_or("inproc-8", String::as_str);
    let rounds = arguments.get(1).and_then(|a| a.parse().ok()).unwrap_or(1_000_000);
    let (transport, what) = case.split_once('-').unwrap_or((case, "8"));
    let run = if what == "group" { all_reduces_grouped } else { all_reduces };
    let elements = match what {
        "64K" => 8 << 10,
        "group" => 4,
        _ => 1,
    };
    let comms = ranks(transport, Config::from_env()?)?;
    // Links are opened by two that wait for each other.
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .iter()
            .map(|comm| {
                scope.spawn(|| {
                    let mut buffer = [1.0f64];
                    comm.reduce_in_place(&mut buffer, ReduceOp::Max, 0)?;
                    comm.broadcast_in_place(&mut buffer, 0)
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })?;
    let (mut zero, mut one) = (vec![1.0; elements], vec![1.0; elements]);
    let start = Instant::now();
    run(&comms, (&mut zero, &mut one), rounds)?;
    let ns = start.elapsed().as_nanos() as f64 / rounds as f64;
    println!("{case}: {rounds} rounds of reduce + broadcast on two ranks: {ns:.1} ns per round");
    Ok(())
}
