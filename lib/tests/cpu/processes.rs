//! Ranks as processes: a part of the table of `exhaustive.rs` over shared memory, TCP and RDMA, and calls with a length
//! per pair.
//!
//! This test binary runs itself again, once per rank.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::common::cells::{COLLECTIVES, Cell, check};
use crate::common::config;
use crate::common::values::several_messages;
use tinynccl::bootstrap::Server;
use tinynccl::comm::packed;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, DType, Error, ReduceOp, Result};

const RANK: &str = "TINYNCCL_TEST_RANK";
const WORLD: &str = "TINYNCCL_TEST_WORLD";
const ID: &str = "TINYNCCL_TEST_ID";
/// Set for the part of the table that an emulated machine does in a minute.
const SHORT: &str = "TINYNCCL_TEST_SHORT";
/// Set for the process that hosts the rendezvous, and ends when its input does.
const HOST: &str = "TINYNCCL_TEST_HOST";
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
    let base = crate::common::config();
    (config.timeout, config.connect_timeout, config.tune) = (base.timeout, base.connect_timeout, base.tune);
    let comm = Comm::init(&id.parse().expect("an id"), rank, world, config.clone()).expect("init");
    let context = format!("{} {}", config.transport, config.algorithm.map_or("auto", Algorithm::name));
    calls(&comm, &context).unwrap_or_else(|e| panic!("{context}: rank {rank} of {world}: {e}"));
    comm.close().expect("nothing has failed");
}

fn calls(comm: &Comm, context: &dyn std::fmt::Display) -> Result<()> {
    let mut root = 0;
    let dtypes = if variable(SHORT).is_some() { &[DType::F32][..] } else { &DType::ALL };
    for collective in COLLECTIVES {
        for &dtype in dtypes {
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
    run_as(transport, false, world, algorithm);
}

fn run_as(transport: &str, encrypt: bool, world: usize, algorithm: &str) {
    let bind = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(bind, world, &config().with(|c| c.encrypt = encrypt)).expect("server");
    let id = server.unique_id().to_string();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        if transport == "verbs" {
            command.env(SHORT, "1");
            if let Some(devices) = devices(rank) {
                command.env("TINYNCCL_VERBS_DEVICE", devices);
            }
        }
        command
            .args(["--exact", "processes::a_rank", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(WORLD, world.to_string())
            .env(ID, &id)
            .env("TINYNCCL_TRANSPORT", transport)
            .env("TINYNCCL_ALGO", algorithm)
            .env("TINYNCCL_ENCRYPT", u8::from(encrypt).to_string())
            .env("TINYNCCL_SHM_CHUNK", MESSAGE.to_string())
            .env("TINYNCCL_TCP_CHUNK", MESSAGE.to_string())
            .env("TINYNCCL_VERBS_CHUNK", MESSAGE.to_string())
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

#[test]
fn over_encrypted_tcp() {
    for (world, algorithm) in [(2, "ring"), (2, "halving-doubling"), (3, "tree"), (4, "auto")] {
        run_as("tcp", true, world, algorithm);
    }
}

/// The devices of a rank in a virtual machine with several nodes (`scripts/rxe-vm.sh`): rank 0 is node a, and so on.
fn devices(rank: usize) -> Option<&'static str> {
    match variable("RXE_VM")?.as_str() {
        "pair" => ["rxe_ab", "rxe_ba"].get(rank).copied(),
        "line" => ["rxe_ab", "rxe_ba,rxe_bc", "rxe_cb"].get(rank).copied(),
        "triangle" => ["rxe_ab,rxe_ac", "rxe_ba,rxe_bc", "rxe_ca,rxe_cb"].get(rank).copied(),
        _ => None,
    }
}

/// Packets that each RDMA device has sent, where the driver counts them.
fn sent_packets() -> BTreeMap<String, u64> {
    let read = |device: std::fs::DirEntry| {
        let path = device.path().join("ports/1/hw_counters/sent_pkts");
        let count = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
        Some((device.file_name().to_string_lossy().into_owned(), count))
    };
    let devices = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    devices.filter_map(read).collect()
}

#[test]
fn over_rdma() {
    let mut config = config();
    config.transport = tinynccl::config::TransportChoice::Verbs;
    if let Err(e) = tinynccl::transport::rdma_ports(&config) {
        assert!(variable("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {e}");
        let _ = writeln!(std::io::stderr().lock(), "SKIPPED: ranks over RDMA: {e}");
        return;
    }
    let world = if variable("RXE_VM").as_deref() == Some("pair") { 2 } else { 3 };
    for algorithm in ["ring", "direct", "auto"] {
        let before = sent_packets();
        run("verbs", world, algorithm);
        // On a triangle, each pair of ranks has a separate subnet, and every one of them carries its pair's messages.
        // On a line the ends' messages pass through both.
        let after = sent_packets();
        let devices = match variable("RXE_VM").as_deref() {
            Some("triangle") => Some(6),
            Some("line") => Some(4),
            _ => None,
        };
        if let Some(devices) = devices {
            assert_eq!(after.len(), devices, "{after:?}");
            for (device, sent) in after {
                assert!(sent > before.get(&device).copied().unwrap_or(0) + 100, "{algorithm}: {device} was not used");
            }
        }
    }
}

/// Rank 0 of 2, with the rendezvous. It does nothing unless it is started for that.
#[test]
fn a_host() {
    if variable(HOST).is_none() {
        return;
    }
    let server = Server::start("127.0.0.1:0".parse().expect("an address"), 2, &config()).expect("server");
    println!("\n{HOST} {}", server.unique_id());
    let _comm = Comm::init_with_server(server, 0, 2, config()).expect("init");
    std::io::stdin().read_line(&mut String::new()).expect("the word to end");
    std::process::abort();
}

#[test]
fn who_hosted_the_rendezvous_is_named_when_it_dies() {
    let mut host = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "processes::a_host", "--nocapture", "--test-threads=1"])
        .env(HOST, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process");
    let lines = BufReader::new(host.stdout.take().expect("piped")).lines();
    let id = lines.map_while(|line| line.ok()).find_map(|line| line.strip_prefix(HOST).map(|id| id.trim().to_owned()));
    let comm = Comm::init(&id.expect("its id").parse().expect("an id"), 1, 2, config()).expect("init");
    drop(host.stdin.take());
    assert!(!host.wait().expect("its end").success());
    // No link has been opened: all this rank can notice is that the rendezvous is gone.
    let error = comm.all_reduce(&[1.0f32], &mut [0.0], ReduceOp::Sum).expect_err("nobody else is left");
    assert!(matches!(error, Error::PeerLost { rank: 1, peer: 0, .. }), "{error}");
}
