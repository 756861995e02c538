//! The server for NCCL's client `ncclras`: its protocol, a job that hangs, clients that send nonsense.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::apart::role;
use super::failures::{Processes, from_hex, say};
use super::functions::*;
use super::rank::{Rank, ok};

/// Longest wait for what is expected.
const LONG: Duration = Duration::from_secs(100);

/// An address of this host that nothing listens at.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap_or_else(|e| panic!("{address}: {e}"));
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Reads one line.
fn line(mut stream: &TcpStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "the connection ended");
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// Sends commands and gives the answer to each.
fn talk(mut stream: &TcpStream, commands: &[&str]) -> Vec<String> {
    let answer = |command: &&str| {
        stream.write_all(format!("{command}\n").as_bytes()).unwrap();
        line(stream)
    };
    commands.iter().map(answer).collect()
}

/// The report of `command`, after the client's greeting.
fn report(address: &str, format: &str, command: &str) -> String {
    let mut stream = connect(address);
    let format = format!("SET FORMAT {format}");
    let answers = talk(&stream, &["CLIENT PROTOCOL 2", "TIMEOUT 20", &format]);
    assert_eq!(answers, ["SERVER PROTOCOL 2\n", "OK\n", "OK\n"]);
    stream.write_all(format!("{command}\n").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn json_report(address: &str) -> Value {
    let text = report(address, "json", "STATUS");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Looks until a report is as expected.
fn until(address: &str, expected: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let report = json_report(address);
        if expected(&report) {
            return report;
        }
        assert!(begin.elapsed() < LONG, "{report:#}");
    }
}

/// Ranks of which all but the last wait in their third all_reduce.
fn all_but_the_last_wait(rank: usize, size: usize, id: &str) {
    if rank + 1 == size {
        // The kernel hands clients to any of the processes: not to the one that will be gone.
        // SAFETY: the only thread of this process that uses the environment.
        unsafe { std::env::set_var("NCCL_RAS_ENABLE", "0") };
    }
    let rank = Rank::join(from_hex(id), rank, size);
    rank.still_works();
    rank.still_works();
    let memory = rank.memory(&[0; 4000]);
    if rank.rank + 1 < size {
        ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream()));
    }
    say("there");
    loop {
        std::thread::park();
    }
}

/// A value of each rank.
fn each<'a>(report: &'a Value, path: &str) -> Vec<&'a Value> {
    let ranks = report["communicators"][0]["ranks"].as_array().unwrap();
    ranks.iter().map(|rank| rank.pointer(path).unwrap()).collect()
}

apart! {
    fn a_job_that_hangs_shows_completed_calls_and_the_missing_rank() {
        if let Some((rank, size, id)) = role() {
            return all_but_the_last_wait(rank, size, &id);
        }
        let (address, folder) = (free_address(), tempfile::tempdir().unwrap());
        let sockets = folder.path().to_str().unwrap();
        let settings =
            [("NCCL_RAS_ADDR", address.as_str()), ("TINYNCCL_STATUS", sockets), ("TINYNCCL_TIMEOUT", "600")];
        let name = concat!(module_path!(), "::a_job_that_hangs_shows_completed_calls_and_the_missing_rank");
        let ranks = Processes::start(name, 3, &settings);
        (0..3).for_each(|rank| assert_eq!(ranks.hear(rank), "there"));
        let found = until(&address, |report| report["tinynccl"]["findings"].as_array().is_some_and(|all| !all.is_empty()));
        assert_eq!((&found["communicators_count"], &found["communicators"][0]["size"]), (&json!(1), &json!(3)));
        assert_eq!(found["communicators"][0]["missing_ranks"], json!([]));
        // The third one has begun on two ranks, and is over on none.
        assert_eq!(each(&found, "/collective_counts/AllReduce"), [3, 3, 2]);
        assert_eq!(each(&found, "/completed_counts/AllReduce"), [2, 2, 2]);
        assert_eq!(each(&found, "/enqueued_counts/AllReduce"), [3, 3, 2]);
        assert_eq!(each(&found, "/status/async_error"), [0, 0, 0]);
        let pids: Vec<u32> = ranks.children.iter().map(|child| child.as_ref().unwrap().id()).collect();
        assert_eq!(each(&found, "/pid"), pids);
        assert_eq!(each(&found, "/cuda_dev"), [0, 1, 2]);
        let finding = &found["tinynccl"]["findings"][0];
        let text = finding["text"].as_str().unwrap();
        assert_eq!(finding["missing"], json!([2]));
        assert!(text.contains("ranks 0, 1 wait in all_reduce #3 (i32, sum, count 1000)"), "{text}");
        assert!(text.contains(&format!("rank 2 (process {} on", pids[2])) && text.contains("all_reduce #2"), "{text}");
        // As text, with more.
        let page = report(&address, "text", "VERBOSE STATUS");
        for words in ["Job summary", "RUNNING  MISMATCH", "rank 2 has not made it", "3 calls enqueued, 2 over"] {
            assert!(page.contains(words), "no {words:?}: {page}");
        }
        // Dead.
        let pid = Pid::from_child(ranks.children[2].as_ref().unwrap());
        let monitor = connect(&address);
        assert_eq!(talk(&monitor, &["SET FORMAT json", "TIMEOUT 1", "MONITOR all"]), ["OK\n", "OK\n", "OK\n"]);
        kill_process(pid, Signal::KILL).unwrap();
        let mut events = String::new();
        while !events.contains("PEER_DEAD") {
            events += &line(&monitor);
        }
        let found = until(&address, |report| report["communicators"][0]["missing_ranks_count"] == 1);
        let missing = &found["communicators"][0]["missing_ranks"][0];
        assert_eq!((&missing["rank"], &missing["pid"]), (&json!(2), &json!(pids[2])));
        assert_eq!(missing["status"], json!({ "unresponsive": true, "considered_dead": true }));
        assert_eq!(each(&found, "/status/async_error"), [6, 6]);
    }

    fn clients_that_send_nonsense_do_no_harm() {
        let (address, folder) = (free_address(), tempfile::tempdir().unwrap());
        for (name, value) in [("NCCL_RAS_ADDR", address.as_str()), ("TINYNCCL_STATUS", folder.path().to_str().unwrap())] {
            // SAFETY: the only thread of this process that uses the environment.
            unsafe { std::env::set_var(name, value) };
        }
        let ranks = super::rank::all(2);
        let nonsense = talk(&connect(&address), &["", "STATUSES", "TIMEOUT soon", "SET FORMAT xml", "MONITOR me", "\0"]);
        assert!(nonsense.iter().all(|answer| answer.starts_with("ERROR: ")), "{nonsense:?}");
        let mut long = connect(&address);
        let _ = long.write_all(&[b'x'; 100_000]);
        let mut rest = Vec::new();
        let _ = long.read_to_end(&mut rest);
        assert_eq!(rest, b"", "a line without an end is no line");
        // Clients that send nothing, and one that goes away in between.
        let _silent: Vec<TcpStream> = (0..3).map(|_| connect(&address)).collect();
        connect(&address).write_all(b"STATUS\n").unwrap();
        let found = json_report(&address);
        // Both ranks are of this process, and have made no call.
        assert_eq!(each(&found, "/rank"), [0, 1]);
        assert_eq!(each(&found, "/collective_counts/AllReduce"), [0, 0]);
        assert_eq!(found["tinynccl"]["findings"], json!([]));
        assert!(report(&address, "text", "STATUS").contains("RUNNING      OK"));
        ranks.into_iter().for_each(Rank::destroy);
    }

    fn a_setting_turns_the_server_off() {
        let address = free_address();
        for (name, value) in [("NCCL_RAS_ADDR", address.as_str()), ("NCCL_RAS_ENABLE", "0")] {
            // SAFETY: the only thread of this process that uses the environment.
            unsafe { std::env::set_var(name, value) };
        }
        let ranks = super::rank::all(2);
        assert!(TcpStream::connect(&address).is_err());
        ranks.into_iter().for_each(Rank::destroy);
    }
}
