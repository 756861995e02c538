//! Latency and bandwidth of the links: one thread on core 0, one on core 1.
//!
//! `cargo bench -p tinynccl --bench link [-- BACKEND...]` prints, per backend, the least time of an 8-byte message one
//! way (half a round trip), the time per message of a stream of 8-byte messages, and GB/s of a stream of large messages
//! (128 KiB, TCP 1 MiB). `relayed-shm` and `relayed-tcp` go through a third rank of the same process, whose forwarder
//! runs on whichever core is free: against `shm` and `tcp` they show what a hop adds. The environment's settings count.
//! `exchange` is an 8-byte all_reduce between two ranks without the arithmetic.

use std::hint::spin_loop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tinynccl::Config;
use tinynccl::Secret;
use tinynccl::config::TransportChoice;
use tinynccl::transport::relay::Routes;
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, LinkOptions, LinkPair, Received, inproc};
use tinynccl::wire::Header;

const WAIT: Duration = Duration::from_secs(10);

fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
        eprintln!("cannot pin to core {core}: {e}");
    }
}

fn header(len: usize) -> Header {
    Header { len: len as u32, count: 1, ..Header::default() }
}

fn send(link: &mut LinkPair, h: &Header, data: &[u8]) {
    while !link.send.send_from(h, data).expect("send") {
        spin_loop();
    }
}

fn recv(link: &mut LinkPair, h: &Header, dst: &mut [u8]) {
    loop {
        match link.recv.recv_into(h, dst).expect("receive") {
            Received::Done => return,
            Received::Pending => spin_loop(),
            Received::Mismatch(h) => panic!("unexpected {h}"),
        }
    }
}

/// Both ends do the same 8-byte exchange: send, then receive. Nanoseconds per exchange: an all_reduce without
/// arithmetic.
fn exchange(link: &mut LinkPair, n: usize) -> f64 {
    let (h, data, mut dst) = (header(8), [1u8; 8], [0u8; 8]);
    let start = Instant::now();
    for _ in 0..n {
        send(link, &h, &data);
        recv(link, &h, &mut dst);
    }
    start.elapsed().as_nanos() as f64 / n as f64
}

fn ping_pong(link: &mut LinkPair, first: bool, n: usize) -> f64 {
    let (h, data, mut dst) = (header(8), [1u8; 8], [0u8; 8]);
    let start = Instant::now();
    for _ in 0..n {
        if first {
            send(link, &h, &data);
        }
        recv(link, &h, &mut dst);
        if !first {
            send(link, &h, &data);
        }
    }
    start.elapsed().as_nanos() as f64 / n as f64 / 2.0
}

/// Nanoseconds per message of a one-way stream.
fn stream(link: &mut LinkPair, first: bool, len: usize, n: usize) -> f64 {
    let (h, mut data) = (header(len), vec![1u8; len]);
    let start = Instant::now();
    for _ in 0..n {
        if first { send(link, &h, &data) } else { recv(link, &h, &mut data) }
    }
    if first {
        recv(link, &header(0), &mut [])
    } else {
        send(link, &header(0), &[])
    }
    start.elapsed().as_nanos() as f64 / n as f64
}

fn measure(mut link: LinkPair, first: bool, options: LinkOptions, fast: bool) -> [f64; 4] {
    pin(usize::from(!first));
    // Many short runs, of which the best counts: on a shared machine some of them are undisturbed.
    let n = if fast { 2000 } else { 100 };
    let best = |f: &mut dyn FnMut() -> f64| (0..200).map(|_| f()).fold(f64::INFINITY, f64::min);
    [
        best(&mut || ping_pong(&mut link, first, n)),
        best(&mut || exchange(&mut link, n)),
        best(&mut || stream(&mut link, first, 8, n)),
        options.max_message as f64 / best(&mut || stream(&mut link, first, options.max_message, 50)),
    ]
}

fn run(name: &str, fast: bool, options: LinkOptions, connect: impl Fn(usize) -> LinkPair + Sync) {
    let results = std::thread::scope(|s| {
        let handles = [0, 1].map(|rank| {
            let connect = &connect;
            s.spawn(move || measure(connect(rank), rank == 0, options, fast))
        });
        handles.map(|h| h.join().expect("thread"))
    });
    let [one_way, exchange, message, bandwidth] = results[0];
    println!("{name:12} {one_way:14.1} {exchange:14.1} {message:14.1} {bandwidth:14.2}");
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let want = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    println!("{:12} {:>14} {:>14} {:>14} {:>14}", "", "8 B 1way ns", "exchange ns", "stream ns/msg", "large GB/s");
    let options = LinkOptions { max_message: 128 << 10, depth: 4 };
    let bells: Arc<[Arc<Doorbell>]> = (0..2).map(|_| Doorbell::new().expect("doorbell")).collect();
    let hub = inproc::Hub::new();
    let in_process = |rank: usize| {
        let to = inproc::ConnectTo { comm: 0, rank, peer_rank: 1 - rank, channel: 0, options };
        hub.connect(&to, &bells[rank], &|| None, WAIT).expect("connect")
    };
    if want("inproc") {
        run("inproc", true, options, in_process);
    }
    let (shm, tcp) = (TransportChoice::Shm, TransportChoice::Tcp);
    for (name, transport) in [("shm", shm), ("tcp", tcp), ("relayed-shm", shm), ("relayed-tcp", tcp)] {
        if !want(name) {
            continue;
        }
        let mut config = Config::from_env().expect("settings");
        config.transport = transport;
        // Rank 2 only relays, if anything.
        let endpoints = [0, 1, 2].map(|rank| Endpoint::new(rank, Secret::new([0; 32]), &config).expect("endpoint"));
        if name.starts_with("relayed") {
            let world: Vec<_> = endpoints.iter().map(|endpoint| endpoint.info()).collect();
            let routes = Routes::new(3, |_, b| b == 2);
            endpoints.iter().for_each(|endpoint| endpoint.introduce(world.clone(), routes.clone()));
        }
        let options = LinkOptions { max_message: if transport == tcp { 1 << 20 } else { 128 << 10 }, ..options };
        run(name, transport == shm, options, |rank| {
            let info = endpoints[1 - rank].info();
            let to = ConnectTo { comm: 0, peer_rank: 1 - rank, info: &info, channel: 0, options };
            endpoints[rank].connect(&to, &bells[rank], &|| None, WAIT).expect("connect")
        });
    }
}
