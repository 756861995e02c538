//! Overhead of a process group over the communicator that it is built on: two ranks, threads on cores 0 and 1, make the
//! same all_reduces by both alternately.
//!
//! `cargo bench -p tinynccl --bench process_group` prints the medians of 61 rounds of either, and the median of their
//! differences. The first line is of one rank alone, where nothing is sent: the calls themselves.

use std::time::Instant;

use tinynccl::process_group::{BackendType, Device, ProcessGroup};
use tinynccl::{Comm, Config, ReduceOp, Result};

const ROUNDS: usize = 61;

fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
        eprintln!("cannot pin to core {core}: {e}");
    }
}

/// Nanoseconds per call.
fn timed(calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / calls as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(comm: &Comm, group: &ProcessGroup, bytes: usize) -> Result<()> {
    let calls = (20_000_000 / (bytes + 2000)).clamp(200, 5000);
    let mut buffer = vec![0f32; bytes / 4];
    let (mut by_comm, mut by_group, mut above) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS + 2 {
        let mut one = 0.0;
        let mut other = 0.0;
        // Who is first has the colder caches.
        for turn in 0..2 {
            if (turn + round) % 2 == 0 {
                one = timed(calls, || comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            } else {
                other = timed(calls, || group.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            }
        }
        if round >= 2 {
            by_comm.push(one);
            by_group.push(other);
            above.push(other - one);
        }
    }
    if comm.rank() == 0 {
        let (one, other, above) = (median(by_comm), median(by_group), median(above));
        let percent = 100.0 * above / one;
        println!("{:>5} {bytes:>7} {one:>9.1} {other:>9.1} {above:>9.1} {percent:>8.2}", comm.size());
    }
    Ok(())
}

fn rank(comm: Comm, sizes: &[usize]) -> Result<()> {
    pin(comm.rank());
    let beside = comm.split(Some(0), 0)?.expect("one colour");
    let group = ProcessGroup::new(beside, BackendType::Tinynccl, Device::None)?;
    sizes.iter().try_for_each(|&bytes| compare(&comm, &group, bytes))
}

fn main() -> Result<()> {
    println!("ranks   bytes   Comm ns  group ns  above ns   above %");
    let config = Config::from_env()?;
    for (ranks, sizes) in [(1, &[8][..]), (2, &[8, 32, 128, 512, 2 << 10, 8 << 10, 32 << 10, 64 << 10])] {
        let ranks = Comm::threads(ranks, config.clone())?;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || rank(comm, sizes))).collect();
            ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
        })?;
    }
    Ok(())
}
