//! Cost of checksums: calls between threads of this process, without and with `TINYNCCL_CHECKSUM`, alternately.
//!
//! `cargo bench -p tinynccl --bench checksum [-- RANKS]` prints, per collective and length, the least time of a call in
//! microseconds of several rounds without and with checksums, and how they compare. What passes through shared memory
//! is one-shot up to the length of a slot and staged beyond (two ranks: their link); `message` is a message point to
//! point, there and back.

use std::time::Instant;

use tinynccl::config::Tune;
use tinynccl::{Comm, Config, ReduceOp, Result};

const ROUNDS: usize = 7;

type Call = fn(&Comm, &mut [u8]) -> Result<()>;

fn all_reduce(comm: &Comm, buffer: &mut [u8]) -> Result<()> {
    comm.all_reduce_in_place(buffer, ReduceOp::Max)
}

fn broadcast(comm: &Comm, buffer: &mut [u8]) -> Result<()> {
    comm.broadcast_in_place(buffer, 0)
}

fn message(comm: &Comm, buffer: &mut [u8]) -> Result<()> {
    match comm.rank() {
        0 => comm.send(buffer, 1).and_then(|()| comm.recv(buffer, 1)),
        1 => comm.recv(buffer, 0).and_then(|()| comm.send(buffer, 0)),
        _ => Ok(()),
    }
}

/// Microseconds per call on rank 0.
fn round(comms: &[Comm], call: Call, bytes: usize) -> f64 {
    let calls = (4 << 20) / (bytes + 2048) + 4;
    let times: Vec<f64> = std::thread::scope(|scope| {
        let rank = |comm| {
            move || {
                let mut buffer = vec![1; bytes];
                call(comm, &mut buffer).and_then(|()| comm.barrier()).expect("a warm-up");
                let start = Instant::now();
                (0..calls).try_for_each(|_| call(comm, &mut buffer)).expect("a call");
                start.elapsed().as_secs_f64() * 1e6 / calls as f64
            }
        };
        let ranks: Vec<_> = comms.iter().map(|comm| scope.spawn(rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    });
    times[0]
}

fn main() {
    let ranks = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(2).max(2);
    let comms = [false, true].map(|checksum| {
        let mut config = Config::from_env().expect("the environment");
        config.checksum = checksum;
        config.tune = Tune::Off;
        Comm::threads(ranks, config).expect("ranks")
    });
    println!("{ranks} ranks        bytes   without      with");
    let calls: [(&str, Call); 3] = [("all_reduce", all_reduce), ("broadcast", broadcast), ("message", message)];
    for (name, call) in calls {
        for bytes in [8, 1 << 10, 32 << 10, 1 << 20, 16 << 20] {
            let mut least = [f64::INFINITY; 2];
            for _ in 0..ROUNDS {
                for (least, comms) in least.iter_mut().zip(&comms) {
                    *least = least.min(round(comms, call, bytes));
                }
            }
            let [without, with] = least;
            println!("{name:<10} {bytes:>12} {without:>9.2} {with:>9.2}  x {:.2}", with / without);
        }
    }
}
