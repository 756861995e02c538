//! Price of `TINYNCCL_VERIFY`: calls between threads of this process, in turn without it, with `sample` and with `all`.
//!
//! `cargo bench -p tinynccl --bench verify [-- RANKS [BYTES] [NAME]]` prints, per collective and length, the least time
//! of a call in microseconds over rounds, and how it compares with that without: where other programs have the cores,
//! too, the least one was disturbed least. A round has enough calls that those of
//! `sample` are among them in their proportion. What passes through shared memory is one-shot up to the length of a
//! slot and staged beyond (two ranks: their link); `message` is a message point to point, there and back; `links` is an
//! all_reduce over links whatever its length.

use std::time::{Duration, Instant};

use tinynccl::config::{Tune, Verify};
use tinynccl::{Comm, Config, ReduceOp, Result};

/// Time for the rounds of one length, at least five of each.
const TIME: Duration = Duration::from_secs(12);

type Call = fn(&Comm, &mut [f32]) -> Result<()>;

fn all_reduce(comm: &Comm, buffer: &mut [f32]) -> Result<()> {
    comm.all_reduce_in_place(buffer, ReduceOp::Max)
}

fn broadcast(comm: &Comm, buffer: &mut [f32]) -> Result<()> {
    comm.broadcast_in_place(buffer, 0)
}

fn message(comm: &Comm, buffer: &mut [f32]) -> Result<()> {
    match comm.rank() {
        0 => comm.send(buffer, 1).and_then(|()| comm.recv(buffer, 1)),
        1 => comm.recv(buffer, 0).and_then(|()| comm.send(buffer, 0)),
        _ => Ok(()),
    }
}

/// Microseconds per call on rank 0.
fn round(comms: &[Comm], call: Call, bytes: usize) -> f64 {
    let calls = 64 * (1 + (64 << 10) / (bytes + 2048));
    let times: Vec<f64> = std::thread::scope(|scope| {
        let rank = |comm| {
            move || {
                let mut buffer = vec![1.0; bytes / 4];
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
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let mut numbers = args.iter().filter_map(|arg| arg.parse::<usize>().ok());
    let (ranks, only) = (numbers.next().unwrap_or(2).max(2), numbers.next());
    let wanted = args.iter().find(|arg| arg.parse::<usize>().is_err());
    let worlds = |links: bool| {
        [Verify::Off, Verify::Sample, Verify::All].map(|verify| {
            let mut config = Config::from_env().expect("the environment");
            (config.verify, config.tune) = (verify, Tune::Off);
            if links {
                (config.one_shot, config.stage) = (0, 0);
            }
            Comm::threads(ranks, config).expect("ranks")
        })
    };
    let (usual, links) = (worlds(false), worlds(true));
    println!("{ranks} ranks        bytes        off     sample        all   sample    all");
    let calls: [(&str, Call, _); 4] = [
        ("all_reduce", all_reduce, &usual),
        ("broadcast", broadcast, &usual),
        ("message", message, &usual),
        ("links", all_reduce, &links),
    ];
    for (name, call, worlds) in calls.into_iter().filter(|(name, ..)| wanted.is_none_or(|wanted| wanted == name)) {
        for bytes in
            [8, 1 << 10, 32 << 10, 1 << 20, 64 << 20].into_iter().filter(|b| only.is_none_or(|only| only == *b))
        {
            let (mut least, begin, mut rounds) = ([f64::INFINITY; 3], Instant::now(), 0);
            while rounds < 5 || begin.elapsed() < TIME {
                for (least, comms) in least.iter_mut().zip(worlds) {
                    *least = least.min(round(comms, call, bytes));
                }
                rounds += 1;
            }
            let [off, sample, all] = least;
            println!(
                "{name:<10} {bytes:>12} {off:>10.2} {sample:>10.2} {all:>10.2}  x {:.3}  x {:.2}",
                sample / off,
                all / off
            );
        }
    }
}
