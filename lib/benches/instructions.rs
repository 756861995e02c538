//! Cost of a small call apart from waiting: one thread makes the calls of both of two in-process ranks.
//!
//! An 8-byte all_reduce is done as its two halves, a reduce to rank 0 and a broadcast from it: the receiver is called
//! after the sender, so no call ever waits, and the number of instructions is the same in every run:
//! ```text
//! cargo bench -p tinynccl --bench instructions --no-run
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='*all_reduces*' \
//!     target/release/deps/instructions-HASH 10000
//! ```
//! The messages go over links; with the argument `board`, through the shared region (one-shot). Without valgrind it
//! prints nanoseconds. `TINYNCCL_TRACE=FILE` shows what recording adds.

use std::time::Instant;

use tinynccl::{Comm, Config, ReduceOp, Result};

/// Not inlined, so that callgrind finds it.
#[inline(never)]
fn all_reduces(comms: &[Comm], rounds: usize) -> Result<()> {
    let (mut zero, mut one) = ([1.0f64], [1.0f64]);
    for _ in 0..rounds {
        comms[1].reduce_in_place(&mut one, ReduceOp::Max, 0)?;
        comms[0].reduce_in_place(&mut zero, ReduceOp::Max, 0)?;
        comms[0].broadcast_in_place(&mut zero, 0)?;
        comms[1].broadcast_in_place(&mut one, 0)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let rounds = std::env::args().filter_map(|a| a.parse::<usize>().ok()).next().unwrap_or(1_000_000);
    let mut config = Config::from_env()?;
    if !std::env::args().any(|a| a == "board") {
        config.one_shot = 0;
    }
    let comms = Comm::threads(2, config)?;
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
    let start = Instant::now();
    all_reduces(&comms, rounds)?;
    let ns = start.elapsed().as_nanos() as f64 / rounds as f64;
    println!("{rounds} rounds of reduce + broadcast of 8 bytes on two ranks: {ns:.1} ns per round");
    Ok(())
}
