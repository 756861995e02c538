//! A rank that stops or dies before the links are open: the others wait for each other then, and name it.

use std::time::Duration;

use program_kit::again::{self, Process, hear, say};
use rustix::process::{Pid, Signal, kill_process};
use tinynccl::bootstrap::Server;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp};

const RANKS: usize = 4;

fn config() -> Config {
    let mut config = crate::common::config();
    // Longer than a silence after which a rank counts as stopped, also on a host with other things to do.
    config.timeout = Duration::from_secs(4);
    config.algorithm = Some(Algorithm::Ring);
    config.transport =
        std::env::var("TINYNCCL_TRANSPORT").map_or(config.transport, |text| text.parse().expect("a name"));
    config
}

/// A rank, which begins when the test sends it a line.
fn rank(role: &str) {
    let (rank, id) = role.split_once(' ').expect("two words");
    let rank: usize = rank.parse().expect("a rank");
    let comm = Comm::init(&id.parse().expect("an id"), rank, RANKS, config()).expect("init");
    say("here");
    hear();
    let error = comm.all_reduce_in_place(&mut vec![1.0f32; 1 << 20], ReduceOp::Sum).expect_err("a rank is missing");
    say(&error.to_string().replace('\n', " "));
    hear();
}

/// Rank 0 gets the signal before any link is open; each of the others must name it.
fn without_rank_0(test: &str, signal: Signal) {
    if let Some(role) = again::role() {
        return rank(&role);
    }
    for transport in ["tcp", "shm"] {
        let server = Server::start("127.0.0.1:0".parse().expect("an address"), RANKS, &config()).expect("server");
        let id = server.unique_id();
        let settings = [("TINYNCCL_TRANSPORT", transport)];
        let mut ranks: Vec<Process> =
            (0..RANKS).map(|rank| again::start(&[], test, &format!("{rank} {id}"), &settings)).collect();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "here"));
        let pid = Pid::from_raw(ranks[0].id().cast_signed()).expect("a process");
        kill_process(pid, signal).expect("it is ours");
        ranks[1..].iter_mut().for_each(|rank| rank.tell("go on"));
        for (number, rank) in (1..).zip(&mut ranks[1..]) {
            let error = rank.line();
            assert!(error.contains("rank 0"), "{transport}, rank {number}: {error}");
            assert!(!error.contains("TINYNCCL_TRANSPORT"), "{transport}, rank {number}: {error}");
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_named_by_those_that_wait_for_others() {
    without_rank_0("opening::a_rank_that_is_stopped_is_named_by_those_that_wait_for_others", Signal::STOP);
}

#[test]
fn a_rank_that_is_killed_is_named_and_not_the_transport() {
    without_rank_0("opening::a_rank_that_is_killed_is_named_and_not_the_transport", Signal::KILL);
}
