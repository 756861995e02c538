//! Time in which a newcomer gets the state of a group: `SharedState::synchronize` over TCP on loopback, from one rank
//! and from three, beside a send and a broadcast of the same bytes.
//!
//! `cargo bench -p tinynccl --bench shared_state [-- MEGABYTES [ROUNDS]]` prints the median and the least time of 21
//! rounds, in which the calls take turns: milliseconds at the newcomer, MB/s, and the share of the speed of the send
//! from one rank. Each rank is a thread with links of its own. The environment's settings count. In a network namespace
//! the link can be slower than memory: in `unshare -n`, first
//! `ip link set lo up; tc qdisc add dev lo root tbf rate 10gbit burst 4mb limit 64mb`.

use std::time::Instant;

use tinynccl::bootstrap::Server;
use tinynccl::config::TransportChoice;
use tinynccl::{Comm, Config, Result, SharedState};

const WAYS: [&str; 4] = ["send", "broadcast", "synchronize", "synchronize, equal"];

/// Seconds until the last rank, a newcomer, has the state.
fn timed(comm: &Comm, way: &str, state: &mut [f32]) -> Result<f64> {
    let newcomer = comm.size() - 1;
    let is_new = comm.rank() == newcomer;
    state.fill(if is_new && way != "synchronize, equal" { 0.0 } else { 0.5 });
    comm.barrier()?;
    let start = Instant::now();
    match way {
        "send" if comm.rank() == 0 => comm.send(state, newcomer)?,
        "send" if is_new => comm.recv(state, 0)?,
        "send" => {}
        "broadcast" => comm.broadcast_in_place(state, 0)?,
        _ => {
            let mut revision = (!is_new).then_some(1);
            SharedState::new(&mut revision).buffer("state", state).synchronize(comm)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    assert!(!is_new || state.iter().all(|&value| value == 0.5));
    comm.barrier()?;
    Ok(seconds)
}

/// The newcomer's median and least time, by way.
fn rank(comm: &Comm, elements: usize, rounds: usize) -> Result<Vec<[f64; 2]>> {
    let mut state = vec![0.0; elements];
    let mut times = vec![Vec::new(); WAYS.len()];
    for round in 0..=rounds {
        for (way, times) in WAYS.iter().zip(&mut times) {
            let seconds = timed(comm, way, &mut state)?;
            // The first round opens links.
            if round > 0 {
                times.push(seconds);
            }
        }
    }
    let sorted = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        [times[times.len() / 2], times[0]]
    };
    Ok(times.into_iter().map(sorted).collect())
}

fn main() -> Result<()> {
    let mut numbers = std::env::args().filter_map(|word| word.parse().ok());
    let (megabytes, rounds) = (numbers.next().unwrap_or(100), numbers.next().unwrap_or(21).max(1));
    let mut config = Config::from_env()?;
    config.transport = TransportChoice::Tcp;
    println!("{megabytes} MB over TCP, {rounds} rounds\n{:>45}{:>26}", "median", "least");
    println!("holders  {:<20}{}", "", format!("{:>8}{:>8}{:>10}", "ms", "MB/s", "of send").repeat(2));
    let mut link = None;
    for holders in [1, 3] {
        let ranks = holders + 1;
        let server = Server::start("127.0.0.1:0".parse().expect("an address"), ranks, &config)?;
        let start = |rank| Comm::init(&server.unique_id(), rank, ranks, config.clone());
        let work = |number| start(number).and_then(|comm| rank(&comm, megabytes * 250_000, rounds));
        let times = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..ranks).map(|number| scope.spawn(move || work(number))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).next_back().expect("a newcomer")
        })?;
        let link = *link.get_or_insert(times[0]);
        for (way, times) in WAYS.iter().zip(times) {
            let row = [0, 1].map(|kind| {
                let (ms, speed) = (1e3 * times[kind], megabytes as f64 / times[kind]);
                format!("{ms:>8.1}{speed:>8.0}{:>10.2}", link[kind] / times[kind])
            });
            println!("{holders:>7}  {way:<20}{}", row.concat());
        }
    }
    Ok(())
}
