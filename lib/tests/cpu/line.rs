//! Ranks on a line of two subnets (`scripts/rxe-vm.sh --line`): rank 0 on node a, rank 1 on node b, ranks 2 and 3 on
//! node c. What rank 0 and the last two send each other goes through rank 1.
//!
//! This test binary runs itself again, once per rank.

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::config;
use tinynccl::algorithm::{self, Shape};
use tinynccl::bootstrap::Server;
use tinynccl::config::TransportChoice;
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Comm, Config, ReduceOp, Result};

const RANK: &str = "TINYNCCL_TEST_RANK";
const ID: &str = "TINYNCCL_TEST_ID";
const ROLE: &str = "TINYNCCL_TEST_ROLE";
const RANKS: usize = 4;
const DEVICES: [&str; RANKS] = ["rxe_ab", "rxe_ba,rxe_bc", "rxe_cb", "rxe_cb"];
const PATIENCE: Duration = Duration::from_secs(60);

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// One rank among processes. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    let (Some(rank), Some(id), Some(role)) = (variable(RANK), variable(ID), variable(ROLE)) else { return };
    let mut settings = Config::from_env().expect("settings");
    let base = config();
    (settings.timeout, settings.connect_timeout, settings.tune) = (base.timeout, base.connect_timeout, base.tune);
    let rank = rank.parse().expect("a rank");
    let comm = Comm::init(&id.parse().expect("an id"), rank, RANKS, settings).expect("init");
    match role.as_str() {
        "calls" => calls(comm).unwrap_or_else(|e| panic!("rank {rank}: {e}")),
        "relay leaves" => relay_leaves(comm).unwrap_or_else(|e| panic!("rank {rank}: {e}")),
        "relay dies" => relay_dies(comm),
        "end dies" => end_dies(comm),
        other => panic!("no role {other}"),
    }
}

/// Sends a line to the parent.
fn say(text: &str) {
    println!("said: {text}");
    std::io::stdout().flush().expect("a pipe");
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("it is dead");
}

fn exchange(comm: &Comm, peer: usize, count: usize) -> Result<()> {
    let (us, mut theirs) = (vec![comm.rank() as u32 + 1; count], vec![0; count]);
    comm.send_recv(&us, peer, &mut theirs, peer)?;
    assert!(theirs.iter().all(|&x| x == peer as u32 + 1), "from rank {peer}");
    Ok(())
}

/// Waits until rank 1 has relayed exactly `bytes` bytes more than `before`: its thread counts after it sends.
fn relayed(comm: &Comm, before: u64, bytes: u64) {
    let start = Instant::now();
    while comm.census().relayed.bytes != before + bytes {
        let now = comm.census().relayed.bytes - before;
        assert!(start.elapsed() < PATIENCE && now <= bytes, "expected {bytes} relayed bytes, got {now}");
        std::thread::yield_now();
    }
}

fn calls(comm: Comm) -> Result<()> {
    let ways: Vec<String> = comm.relayed().iter().map(ToString::to_string).collect();
    let way = |far: usize| format!("rank 0 ↔ rank {far}: no common subnet, through rank 1");
    assert_eq!(ways, [way(2), way(3)]);
    let is_relay = comm.rank() == 1;
    for count in [2usize, 1 << 18] {
        let before = comm.census().relayed.bytes;
        comm.barrier()?;
        match comm.rank() {
            0 => exchange(&comm, 2, count)?,
            2 => exchange(&comm, 0, count)?,
            _ => {}
        }
        if is_relay {
            relayed(&comm, before, 2 * 4 * count as u64);
        }
        comm.barrier()?;
    }
    let (count, channels) = (50_001, comm.config().channels);
    let shape = Shape { collective: Collective::AllReduce, ranks: RANKS, root: 0, channels };
    for algorithm in [Algorithm::Ring, Algorithm::Direct] {
        let before = comm.census().relayed.bytes;
        comm.set_algorithm(Some(algorithm));
        comm.barrier()?;
        let input: Vec<f32> = (0..count).map(|i| (i % 100 + comm.rank()) as f32).collect();
        let mut output = vec![0.0; count];
        comm.all_reduce(&input, &mut output, ReduceOp::Sum)?;
        assert!(output.iter().enumerate().all(|(i, &x)| x == (RANKS * (i % 100) + 6) as f32), "{algorithm}");
        if is_relay {
            let sends = |rank: usize| {
                let program = algorithm::program(algorithm, &shape, rank).expect("a program");
                let partition = program.partition(count, size_of::<f32>(), comm.config().verbs_chunk);
                algorithm::bytes_sent(algorithm, &shape, rank, &partition).expect("a formula")
            };
            let through = match algorithm {
                // Of a ring only the last hop, from rank 3 to rank 0.
                Algorithm::Ring => sends(3),
                // Rank 0 with two of its three peers.
                _ => 2 * (sends(0) / 3 + sends(2) / 3),
            };
            relayed(&comm, before, through);
            let total = comm.census().relayed;
            say(&format!("{algorithm}: relayed {through} bytes; {total:?}"));
        }
        comm.barrier()?;
    }
    comm.close()
}

/// Rank 1 has nothing to do and goes; the ends go on.
fn relay_leaves(comm: Comm) -> Result<()> {
    let rank = comm.rank();
    for round in 0..3 {
        match rank {
            0 => exchange(&comm, 2, 70_000)?,
            2 => exchange(&comm, 0, 70_000)?,
            1 if round == 0 => {
                drop(comm);
                say("left");
                return Ok(());
            }
            _ => {}
        }
    }
    if rank != 3 {
        say("done");
    }
    comm.close()
}

/// Ranks 0 and 2 alone, which learn of rank 1's end only from their links.
fn relay_dies(comm: Comm) {
    let rank = comm.rank();
    let ends = comm.split((rank == 0 || rank == 2).then_some(0), 0).expect("split");
    let Some(ends) = ends else {
        if rank != 1 {
            return;
        }
        let start = Instant::now();
        while comm.census().relayed.messages <= 20 {
            assert!(start.elapsed() < PATIENCE, "nothing to relay");
            std::thread::yield_now();
        }
        die();
    };
    let e = (0..).find_map(|_| exchange(&ends, 1 - ends.rank(), 70_000).err()).expect("an error");
    say(&e.to_string());
    // Its world has failed too.
    drop(ends);
}

/// Rank 2 dies; ranks 0 and 3, who go through the same relay, go on.
fn end_dies(comm: Comm) {
    let rank = comm.rank();
    let pair = |a: usize, b: usize| comm.split((rank == a || rank == b).then_some(0), 0).expect("split");
    let (first, second) = (pair(0, 2), pair(0, 3));
    if rank == 1 {
        // Returning does not end it: the relay stays.
        return;
    }
    if let (Some(pair), 2) = (&first, rank) {
        for _ in 0..5 {
            exchange(pair, 0, 70_000).expect("rank 0 is there");
        }
        die();
    }
    if let Some(pair) = first {
        let e = (0..).find_map(|_| exchange(&pair, 1, 70_000).err()).expect("an error");
        say(&e.to_string());
    }
    if let Some(pair) = second {
        for _ in 0..5 {
            exchange(&pair, 1 - pair.rank(), 70_000).expect("the other is there, and the relay");
        }
        say("went on");
    }
}

/// Runs the ranks in a role: the lines that each of them sent, and its exit.
fn run(role: &str) -> Option<Vec<(String, Output)>> {
    let mut settings = config();
    settings.transport = TransportChoice::Verbs;
    if variable("RXE_VM").as_deref() != Some("line") || tinynccl::transport::rdma_ports(&settings).is_err() {
        let _ = writeln!(
            std::io::stderr().lock(),
            "SKIPPED: {role} on a line: it takes scripts/rxe-vm.sh --line and the feature verbs"
        );
        return None;
    }
    let server = Server::start("127.0.0.1:0".parse().expect("an address"), RANKS, &settings).expect("server");
    let id = server.unique_id().to_string();
    let start = |rank: usize| -> Child {
        Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "line::a_rank", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(ID, &id)
            .env(ROLE, role)
            .env("TINYNCCL_TRANSPORT", "verbs")
            .env("TINYNCCL_VERBS_DEVICE", DEVICES[rank])
            .env("TINYNCCL_VERBS_CHUNK", "65536")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process")
    };
    let children: Vec<Child> = (0..RANKS).map(start).collect();
    let ends = children.into_iter().map(|child| {
        let output = child.wait_with_output().expect("its end");
        let said: Vec<String> = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| Some(line.split_once("said: ")?.1.to_owned()))
            .collect();
        (said.join("\n"), output)
    });
    Some(ends.collect())
}

fn all_well(ranks: &[(String, Output)]) {
    for (rank, (said, output)) in ranks.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn ends_talk_through_the_middle_which_counts_their_bytes() {
    let Some(ranks) = run("calls") else { return };
    all_well(&ranks);
    println!("{}", ranks[1].0);
}

#[test]
fn a_relay_that_is_done_stays_until_the_ends_are() {
    let Some(ranks) = run("relay leaves") else { return };
    all_well(&ranks);
    let said: Vec<&str> = ranks.iter().map(|(said, _)| said.as_str()).collect();
    assert_eq!(said, ["done", "left", "done", ""]);
}

#[test]
fn the_death_of_the_relay_is_told_to_both_ends() {
    let Some(ranks) = run("relay dies") else { return };
    for rank in [0, 2] {
        let (text, output) = &ranks[rank];
        println!("rank {rank}: {text}");
        // Its own link's error, or the other end's, which came first.
        let words = "rank 1 of the world, which relays between its ranks ";
        assert!(
            text.contains(words) && ["0 and 2", "2 and 0"].iter().any(|ends| text.contains(ends)),
            "{text}\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn the_death_of_an_end_is_told_to_the_other_and_the_relay_goes_on() {
    let Some(ranks) = run("end dies") else { return };
    println!("rank 0: {}", ranks[0].0);
    let lines: Vec<&str> = ranks[0].0.lines().collect();
    assert!(
        matches!(lines[..], [error, "went on"] if error.contains("lost rank") || error.contains("is gone")),
        "{lines:?}"
    );
    assert_eq!(ranks[3].0, "went on", "{}", String::from_utf8_lossy(&ranks[3].1.stderr));
    assert!(ranks[1].1.status.success(), "{}", String::from_utf8_lossy(&ranks[1].1.stderr));
}
