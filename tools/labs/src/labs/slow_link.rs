//! A ring in which one link is slower than the others.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tinynccl::transport::faulty::{self, Faults};
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp};

use crate::ranks::{Announced, in_threads};

const RANKS: usize = 4;
const CALLS: u32 = 20;
/// The slow link takes this long for each message.
const REST: Duration = Duration::from_millis(5);
/// And leads from this rank to the next one.
const FROM: usize = 2;

/// Ranks are threads here: their links can be wrapped in faults.
pub(crate) fn run(fixed: bool) -> Result<u8> {
    let mut config = Config::from_env()?;
    config.algorithm.get_or_insert(Algorithm::Ring);
    let (slow, none) = (Faults { rest: REST, ..Faults::default() }, Faults::default());
    let comms = Comm::threads_with_links(RANKS, config, move |rank, peer, pair| {
        let is_slow = !fixed && (rank, peer) == ((FROM + 1) % RANKS, FROM);
        faulty::wrap(pair, if is_slow { &slow } else { &none })
    })?;
    let times = in_threads(comms, train)?;
    for (rank, time) in times.iter().enumerate() {
        println!("rank {rank}: {:.2} ms per all_reduce of 64 KiB", time.as_secs_f64() * 1e3);
    }
    let slowest = times.into_iter().max().context("no ranks")?;
    // A ring sends 2(n - 1) messages over each link, one after the other. Other programs on the processors make a ring
    // as slow without any such link.
    if fixed || slowest < REST * 2 * (RANKS as u32 - 1) - REST {
        return Ok(0);
    }
    Err(Announced(
        "all four ranks are slow, and the same calls take microseconds elsewhere: which link is it?".to_owned(),
    )
    .into())
}

/// The mean time of a call.
fn train(comm: &Comm) -> Result<Duration> {
    let mut gradients = vec![1.0f32; 16 << 10];
    comm.all_reduce_in_place(&mut gradients, ReduceOp::Avg)?;
    let start = Instant::now();
    for _ in 0..CALLS {
        comm.all_reduce_in_place(&mut gradients, ReduceOp::Avg)?;
    }
    Ok(start.elapsed() / CALLS)
}
