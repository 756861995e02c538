//! Symmetric memory between processes: this test binary runs itself again as the other ranks.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tinynccl::bootstrap::{Server, UniqueId};
use tinynccl::{Comm, Config, Error, ReduceOp};

const ROLE: &str = "TINYNCCL_TEST_SYMMETRIC";
const RANKS: usize = 3;

fn config() -> Config {
    let mut config = Config::default();
    // A stopped rank is found out by it.
    config.timeout = Duration::from_secs(6);
    config.heartbeat = Duration::from_millis(100);
    config.tune = tinynccl::config::Tune::Off;
    config
}

/// Small collectives, and large ones on symmetric buffers, until the communicator fails.
fn work(comm: &Comm, each: &mut dyn FnMut(u64)) -> Error {
    let mut large = comm.alloc::<u64>(40_000).expect("alloc");
    assert!(large.is_shared());
    let n = comm.size() as u64;
    for round in 0u64.. {
        let mut small = [round, comm.rank() as u64];
        let outcome = comm.all_reduce_in_place(&mut small, ReduceOp::Sum).and_then(|()| {
            assert_eq!(small, [n * round, n * (n - 1) / 2]);
            large.fill(round);
            comm.all_reduce_in_place(&mut large, ReduceOp::Sum)?;
            assert!(large.iter().all(|&x| x == n * round));
            Ok(())
        });
        if let Err(error) = outcome {
            return error;
        }
        each(round);
    }
    unreachable!("the loop ends with an error")
}

/// A rank. It does nothing unless it is started as one.
#[test]
fn rank_process() {
    rank(|comm, each| work(comm, each));
}

/// Does the `work` of a rank until it fails; it must report each round. Nothing unless this process is a rank.
pub(crate) fn rank(work: impl FnOnce(&Comm, &mut dyn FnMut(u64)) -> Error) {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (rank, id) = role.split_once(' ').expect("rank and id");
    let id: UniqueId = id.parse().expect("an id");
    let comm = Comm::init(&id, rank.parse().expect("a rank"), RANKS, config()).expect("init");
    let error = work(&comm, &mut |round| {
        if round == 200 {
            println!("\nround 200");
        }
    });
    println!("\nerror: {error}");
}

fn start(test: &str, rank: usize, id: &UniqueId) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{rank} {id}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    (child, stdout)
}

fn line_with(mark: &str, from: &mut impl BufRead) -> String {
    loop {
        let mut line = String::new();
        assert!(from.read_line(&mut line).expect("a line") > 0, "the rank ended without {mark:?}");
        if line.contains(mark) {
            return line;
        }
    }
}

/// Rank 1 of the ranks that `test` is gets the signal; the others must name it.
pub(crate) fn victim(test: &str, signal: rustix::process::Signal) {
    let server = Server::start("127.0.0.1:0".parse().expect("an address"), RANKS, &config()).expect("server");
    let id = server.unique_id();
    let mut ranks: Vec<_> = (0..RANKS).map(|rank| start(test, rank, &id)).collect();
    for (_, stdout) in &mut ranks {
        line_with("round 200", stdout);
    }
    let pid = rustix::process::Pid::from_child(&ranks[1].0);
    rustix::process::kill_process(pid, signal).expect("kill");
    for rank in [0, 2] {
        let error = line_with("error: ", &mut ranks[rank].1);
        assert!(error.contains("rank 1"), "rank {rank}: {error}");
    }
    let _ = ranks[1].0.kill();
    for (child, _) in &mut ranks {
        child.wait().expect("wait");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    victim("symmetric_processes::rank_process", rustix::process::Signal::KILL);
}

#[test]
fn a_stopped_rank_is_named_by_all_others() {
    victim("symmetric_processes::rank_process", rustix::process::Signal::STOP);
}
