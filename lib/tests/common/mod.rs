//! Worlds of ranks as threads, over every transport.
#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, reason = "each test file uses its own part of this")]

pub mod cells;
pub mod exact;
pub mod memory;
pub mod tap;
pub mod values;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tinynccl::bootstrap::Server;
use tinynccl::config::{TransportChoice, Tune};
use tinynccl::wire::Collective;
use tinynccl::{Comm, Config, Result};

/// Transport of the links of a test world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fabric {
    /// Threads of one process over heap memory.
    Inproc,
    /// Shared memory passed between "processes" (threads here).
    Shm,
    /// Loopback TCP.
    Tcp,
}

/// All of them.
pub const FABRICS: [Fabric; 3] = [Fabric::Inproc, Fabric::Shm, Fabric::Tcp];

/// Short deadlines, so that a broken test ends.
pub fn config() -> Config {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(30);
    config.connect_timeout = Duration::from_secs(30);
    config.tune = Tune::Off;
    config
}

/// Elements of a rank's input and output, where each of the `n` ranks has a segment of `count`, or all have the same
/// buffer.
pub fn lengths(collective: Collective, n: usize, count: usize) -> (usize, usize) {
    match collective {
        Collective::AllGather | Collective::Gather => (count, n * count),
        Collective::ReduceScatter | Collective::Scatter => (n * count, count),
        Collective::AllToAll => (n * count, n * count),
        _ => (count, count),
    }
}

/// Runs `f` once per rank, each in a separate thread, and gives the results in rank order.
pub fn run<R: Send>(fabric: Fabric, ranks: usize, config: &Config, f: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let f = &f;
    match fabric {
        Fabric::Inproc => {
            let comms = Comm::threads(ranks, config.clone()).expect("threads");
            std::thread::scope(|scope| {
                let handles: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || f(comm))).collect();
                handles.into_iter().map(|h| h.join().expect("a rank panicked")).collect()
            })
        }
        Fabric::Shm | Fabric::Tcp => {
            let mut config = config.clone();
            config.transport = if fabric == Fabric::Shm { TransportChoice::Shm } else { TransportChoice::Tcp };
            let bind = "127.0.0.1:0".parse().expect("an address");
            let server = Server::start(bind, ranks, &config).expect("server");
            let id = server.unique_id();
            std::thread::scope(|scope| {
                let handles: Vec<_> = (0..ranks)
                    .map(|rank| {
                        let (id, config) = (id.clone(), config.clone());
                        scope.spawn(move || f(Comm::init(&id, rank, ranks, config).expect("init")))
                    })
                    .collect();
                handles.into_iter().map(|h| h.join().expect("a rank panicked")).collect()
            })
        }
    }
}

/// [`run`] for ranks that must succeed.
pub fn run_ok<R: Send>(fabric: Fabric, ranks: usize, config: &Config, f: impl Fn(Comm) -> Result<R> + Sync) -> Vec<R> {
    run(fabric, ranks, config, f)
        .into_iter()
        .enumerate()
        .map(|(rank, result)| result.unwrap_or_else(|e| panic!("{fabric:?}, rank {rank} of {ranks}: {e}")))
        .collect()
}

/// Runs all tasks in this thread, each as far as it goes whenever it is woken: the least that an executor does. Returns
/// their outputs in order.
pub fn run_tasks<R>(tasks: Vec<Pin<Box<dyn Future<Output = R> + '_>>>) -> Vec<R> {
    struct Waking(usize, mpsc::Sender<usize>);
    impl Wake for Waking {
        fn wake(self: Arc<Self>) {
            let _ = self.1.send(self.0);
        }
    }
    let (woken, wakes) = mpsc::channel();
    let mut tasks: Vec<_> = tasks.into_iter().map(|task| (task, None)).collect();
    (0..tasks.len()).for_each(|i| woken.send(i).expect("we have the other end"));
    while tasks.iter().any(|(_, output)| output.is_none()) {
        let i = wakes.recv_timeout(Duration::from_secs(120)).expect("a task is woken");
        let (task, output) = &mut tasks[i];
        if output.is_none() {
            let waker = Waker::from(Arc::new(Waking(i, woken.clone())));
            if let Poll::Ready(value) = task.as_mut().poll(&mut Context::from_waker(&waker)) {
                *output = Some(value);
            }
        }
    }
    tasks.into_iter().filter_map(|(_, output)| output).collect()
}
