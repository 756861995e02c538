//! Ranks as processes: a part of the table of `exhaustive.rs` over shared memory and TCP, and calls with a length per pair.
//!
//! This test binary runs itself again, once per rank.

mod common;

use std::process::{Command, Stdio};

use common::cells::{COLLECTIVES, Cell, check};
use common::config;
use common::values::several_messages;
use tinynccl::bootstrap::Server;
use tinynccl::comm::packed;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, DType, ReduceOp, Result};

const RANK: &str = "TINYNCCL_TEST_RANK";
const WORLD: &str = "TINYNCCL_TEST_WORLD";
const ID: &str = "TINYNCCL_TEST_ID";
const MESSAGE: usize = 4 << 10;

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// One rank among processes. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let (Some(rank), Some(world), Some(id)) = (variable(RANK), variable(WORLD), variable(ID)) else { return };
    let (rank, world): (usize, usize) = (rank.parse().expect("a rank"), world.parse().expect("a number of ranks"));
    let mut config = Config::from_env().expect("settings");
    let base = common::config();
    (config.timeout, config.connect_timeout, config.tune) = (base.timeout, base.connect_timeout, base.tune);
    let comm = Comm::init(&id.parse().expect("an id"), rank, world, config.clone()).expect("init");
    let context = format!("{} {}", config.transport, config.algorithm.map_or("auto", Algorithm::name));
    calls(&comm, &context).unwrap_or_else(|e| panic!("{context}: rank {rank} of {world}: {e}"));
    comm.close().expect("nothing has failed");
}

fn calls(comm: &Comm, context: &dyn std::fmt::Display) -> Result<()> {
    let mut root = 0;
    for collective in COLLECTIVES {
        for dtype in DType::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                for count in [0, 1, 37, several_messages(dtype, comm.size(), MESSAGE)] {
                    root = (root + 1) % comm.size();
                    check(comm, Cell { collective, dtype, op, root, count }, context)?;
                }
            }
        }
    }
    let (rank, n) = (comm.rank(), comm.size());
    let send = packed(&(0..n).map(|to| 5000 * rank + 7 * to).collect::<Vec<_>>());
    let recv = packed(&(0..n).map(|from| 5000 * from + 7 * rank).collect::<Vec<_>>());
    let input: Vec<u32> = (0..n).flat_map(|to| vec![(100 * rank + to) as u32; send[to].len()]).collect();
    let mut output = vec![9; recv[n - 1].end];
    comm.all_to_all_v(&input, &send, &mut output, &recv)?;
    for (from, range) in recv.into_iter().enumerate() {
        assert!(output[range].iter().all(|&x| x == (100 * from + rank) as u32), "{context}: from rank {from}");
    }
    Ok(())
}

fn run(transport: &str, world: usize, algorithm: &str) {
    let bind = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(bind, [3; 16], world, &config()).expect("server");
    let id = server.unique_id().to_string();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(WORLD, world.to_string())
            .env(ID, &id)
            .env("TINYNCCL_TRANSPORT", transport)
            .env("TINYNCCL_ALGO", algorithm)
            .env("TINYNCCL_SHM_CHUNK", MESSAGE.to_string())
            .env("TINYNCCL_TCP_CHUNK", MESSAGE.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process")
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().expect("its end");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{transport}, {algorithm}: rank {rank} of {world}: {text}");
    }
}

#[test]
fn over_shared_memory() {
    for algorithm in Algorithm::ALL.map(Algorithm::name).into_iter().chain(["auto"]) {
        run("shm", 3, algorithm);
    }
}

#[test]
fn over_tcp() {
    for algorithm in Algorithm::ALL.map(Algorithm::name).into_iter().chain(["auto"]) {
        run("tcp", 2, algorithm);
    }
    run("tcp", 4, "auto");
}
