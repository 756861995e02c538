//! Kinds of hang. In each the status names the rank that the others miss, with its last call. The kernel that holds a
//! GPU is in `lib/tests/cuda/hangs.rs`.
//!
//! `--nocapture` prints how long one question took.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use program_kit::{again, nodes};
use rustix::process::Signal;
use serde_json::Value;
use tinynccl::bootstrap::Server;
use tinynccl::{Comm, Config, ReduceOp, Result};

use crate::status::{Job, finding, hold, status, text};

/// Bytes that no buffer of a link, a socket or shared memory holds.
const LARGE: usize = 64 << 20;

/// One rank of the job `script`, up to the wait.
pub(crate) fn play(comm: &Comm, script: &str) -> Result<()> {
    let all_reduce = |count: usize| comm.all_reduce_in_place(&mut vec![1f32; count], ReduceOp::Sum);
    let (rank, last) = (comm.rank(), comm.rank() == comm.size() - 1);
    // Every kind but the first ones begins with a call that all make, which is the last one of the rank that is missed.
    comm.broadcast_in_place(&mut [1f32], 0)?;
    match script {
        "dtype" if last => comm.all_reduce_in_place(&mut [1f64; 4], ReduceOp::Sum),
        "operator" if last => comm.all_reduce_in_place(&mut [1f32; 8], ReduceOp::Max),
        "collective" if last => comm.barrier(),
        "root" => comm.broadcast_in_place(&mut [1f32; 8], rank % 2),
        // What it has to do outside of the library takes long.
        "loader" if last => {
            hold();
            Ok(())
        }
        "lock" if last => deadlock(),
        "pipe" if last => full_pipe(),
        "exit" if last => {
            hold();
            std::process::exit(0)
        }
        // It drops the communicator next.
        "closed" if last => Ok(()),
        "dtype" | "operator" | "collective" | "loader" | "lock" | "pipe" | "exit" | "closed" => all_reduce(8),
        "loop" => (0..).try_for_each(|_| all_reduce(1024)),
        "async" => {
            if !last {
                std::mem::forget(comm.all_reduce_in_place_async(vec![1f32; 8], ReduceOp::Sum)?);
            }
            hold();
            Ok(())
        }
        "send" if rank == 0 => comm.send(&vec![1u8; LARGE], 1),
        "recv" if rank == 0 => comm.recv(&mut [1f32; 8], 1),
        "send" | "recv" => Ok(()),
        "circle" => {
            let (next, before) = ((rank + 1) % comm.size(), (rank + comm.size() - 1) % comm.size());
            comm.send(&vec![1u8; LARGE], next)?;
            comm.recv(&mut vec![0u8; LARGE], before)
        }
        "group" if last => Ok(()),
        "group" => {
            let (one, mut got) = ([rank as f32; 8], [0f32; 8]);
            let (next, before) = ((rank + 1) % comm.size(), (rank + comm.size() - 1) % comm.size());
            comm.group(|g| {
                g.send(&one, next)?;
                g.recv(&mut got, before)
            })
        }
        "split" | "agree" | "shrink" if last => Ok(()),
        "split" => comm.split(Some(0), 0).map(drop),
        "agree" => comm.agree(1).map(drop),
        "shrink" => comm.shrink().map(drop),
        other => panic!("no script {other:?}"),
    }
}

/// Two threads of the program that each wait for the other's lock.
fn deadlock() -> Result<()> {
    let (one, two) = (Mutex::new(()), Mutex::new(()));
    let both = std::sync::Barrier::new(2);
    let wait = |first: &Mutex<()>, second: &Mutex<()>| {
        let _first = first.lock();
        both.wait();
        drop(second.lock());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| wait(&one, &two));
        wait(&two, &one);
    });
    Ok(())
}

/// Writes to a pipe that is not read.
fn full_pipe() -> Result<()> {
    use std::io::Write as _;
    let (_reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(&vec![0; LARGE]).expect("it stays open");
    Ok(())
}

/// A kind of hang.
struct Kind {
    name: &'static str,
    script: &'static str,
    ranks: usize,
    settings: &'static [(&'static str, &'static str)],
    /// Event that meets the last rank once the job runs.
    signal: Option<Signal>,
    /// Ranks that the status must name.
    missing: &'static [u64],
    /// Words of one of its sentences.
    words: &'static [&'static str],
}

const THREE: Kind = Kind { name: "", script: "", ranks: 3, settings: &[], signal: None, missing: &[2], words: &[] };
const TWO: Kind = Kind { ranks: 2, missing: &[1], ..THREE };
/// Ranks that disagree fail at once, and the error has both calls.
const DISAGREE: Kind = Kind { ranks: 2, missing: &[], ..THREE };
/// The last call of all ranks, in every script but the first ones.
const AFTER_BROADCAST: &[&str] =
    &["ranks 0, 1 wait in all_reduce #2 (f32, sum, count 8)", "rank 2 (process", "its last call was broadcast #1"];

const KINDS: &[Kind] = &[
    Kind { name: "a rank is absent", script: "absent", words: AFTER_BROADCAST, ..THREE },
    Kind { name: "another count", script: "count", words: &["it has failed on", "count 8", "count 9"], ..DISAGREE },
    Kind { name: "another type", script: "dtype", words: &["it has failed on", "f32", "f64"], ..DISAGREE },
    Kind { name: "another operator", script: "operator", words: &["it has failed on", "sum", "max"], ..DISAGREE },
    Kind { name: "another root", script: "root", words: &["it has failed on", "root 0", "root 1"], ..DISAGREE },
    Kind {
        name: "another collective",
        script: "collective",
        words: &["it has failed on", "all_reduce #2", "barrier #2"],
        ..DISAGREE
    },
    Kind {
        name: "two communicators in two orders",
        script: "order",
        words: &["rank 1 (process", "it is in all_reduce #2 of communicator"],
        ..TWO
    },
    Kind {
        name: "stopped between calls",
        script: "absent",
        signal: Some(Signal::STOP),
        words: &["ranks 0, 1 wait in all_reduce #2", "is stopped", "its last call was broadcast #1"],
        ..THREE
    },
    Kind {
        name: "stopped, perhaps in a call",
        script: "loop",
        signal: Some(Signal::STOP),
        words: &["ranks 0, 1 wait in all_reduce #", "rank 2 (process", "is stopped", "all_reduce #"],
        ..THREE
    },
    Kind {
        name: "killed in set-up",
        script: "late",
        signal: Some(Signal::KILL),
        words: &["start of 3 ranks at", "ranks 0, 1 wait for", "no process has come as rank 2"],
        ..THREE
    },
    Kind {
        name: "waits before its set-up",
        script: "late",
        words: &["start of 3 ranks at", "ranks 0, 1 wait for", "no process has come as rank 2"],
        ..THREE
    },
    Kind {
        name: "killed in a call",
        script: "loop",
        signal: Some(Signal::KILL),
        words: &["it has failed on ranks 0, 1", "rank 2 (process", "is lost", "all_reduce #"],
        ..THREE
    },
    Kind {
        name: "exits without closing",
        script: "exit",
        words: &["it has failed on ranks 0, 1", "rank 2 (process", "is lost", "its last call was broadcast #1"],
        ..THREE
    },
    Kind {
        name: "closes early",
        script: "closed",
        words: &["it has failed on ranks 0, 1", "it closed its communicator and left", "rank 2 (process"],
        ..THREE
    },
    Kind { name: "a slow data loader", script: "loader", words: AFTER_BROADCAST, ..THREE },
    Kind { name: "two locks in two orders", script: "lock", words: AFTER_BROADCAST, ..THREE },
    Kind { name: "a full pipe of the program's", script: "pipe", words: AFTER_BROADCAST, ..THREE },
    Kind { name: "an asynchronous call without a wait", script: "async", words: AFTER_BROADCAST, ..THREE },
    Kind {
        name: "send without recv",
        script: "send",
        words: &[
            "rank 0 waits for rank 1 in send #1 (u8, count 67108864, to rank 1)",
            "its last call was broadcast #1",
        ],
        ..TWO
    },
    Kind {
        name: "a full socket",
        script: "send",
        settings: &[("TINYNCCL_TRANSPORT", "tcp")],
        words: &[
            "rank 0 waits for rank 1 in send #1 (u8, count 67108864, to rank 1)",
            "its last call was broadcast #1",
        ],
        ..TWO
    },
    Kind {
        name: "recv without send",
        script: "recv",
        words: &["rank 0 waits for rank 1 in recv #1 (f32, count 8, from rank 1)", "its last call was broadcast #1"],
        ..TWO
    },
    Kind {
        name: "every rank sends first",
        script: "circle",
        missing: &[],
        words: &["rank 0 waits for rank 1 in send #1", "rank 1 waits for rank 0 in send #1", "into one group"],
        ..TWO
    },
    Kind {
        name: "one rank makes no group",
        script: "group",
        words: &["rank 0 waits for rank 2 in recv #2 (f32, count 8, from rank 2)", "rank 2 (process", "broadcast #1"],
        ..THREE
    },
    Kind {
        name: "one rank does not split",
        script: "split",
        words: &["ranks 0, 1 wait in split 0 for", "rank 2 has not come", "its last call was broadcast #1"],
        ..THREE
    },
    Kind {
        name: "one rank does not agree",
        script: "agree",
        words: &["ranks 0, 1 wait in agree for", "rank 2 has not come", "its last call was broadcast #1"],
        ..THREE
    },
    Kind {
        name: "one rank does not shrink",
        script: "shrink",
        words: &["ranks 0, 1 wait in shrink for", "rank 2 has not come", "its last call was broadcast #1"],
        ..THREE
    },
];

/// A sentence of the status has the words, and it names the ranks.
fn named(folder: &Path, kind: &Kind) -> Value {
    let found = finding(folder, |finding| kind.words.iter().all(|words| text(finding).contains(words)));
    assert_eq!(found["missing"], serde_json::json!(kind.missing), "{}: {found}", kind.name);
    let begin = Instant::now();
    status(folder, &["--after", "0"]);
    println!("| {} | {:.2} s | {} |", kind.name, begin.elapsed().as_secs_f64(), text(&found));
    found
}

/// Every kind from this one on, in steps: tests run beside each other.
fn every(first: usize, step: usize) {
    for kind in KINDS.iter().skip(first).step_by(step) {
        let mut job = Job::with(kind.ranks, kind.script, kind.settings);
        if kind.script == "exit" {
            job.hears_of_last();
            drop(job.ranks[kind.ranks - 1].stdin.take());
        }
        let Some(signal) = kind.signal else {
            named(job.folder.path(), kind);
            continue;
        };
        if kind.script != "late" {
            job.hears_of_last();
        }
        job.signal(kind.ranks - 1, signal);
        named(job.folder.path(), kind);
        if signal == Signal::STOP {
            job.signal(kind.ranks - 1, Signal::CONT);
        }
    }
}

#[test]
fn the_first_kinds() {
    every(0, 3);
}

#[test]
fn the_second_kinds() {
    every(1, 3);
}

#[test]
fn the_third_kinds() {
    every(2, 3);
}

/// A rank in a network of its own, which makes calls until the cable is cut.
fn at_a_node(name: &str) {
    again::say("here");
    assert_eq!(again::hear(), "go");
    let config = || Config::from_env().expect("settings");
    let at = (Ipv4Addr::new(10, 0, 1, 1), 0).into();
    let server = (name == "left").then(|| Server::start(at, 2, &config()).expect("a store"));
    if let Some(server) = &server {
        again::say(&server.unique_id().to_string());
    }
    let id = again::hear();
    let rank = usize::from(name != "left");
    let comm = Comm::init(&id.parse().expect("an id"), rank, 2, config()).expect("a communicator");
    again::say("runs");
    let outcome = (0..).try_for_each(|_| comm.all_reduce_in_place(&mut [1f32; 1024], ReduceOp::Sum));
    println!("{name}: {outcome:?}");
}

#[test]
fn a_cut_cable() {
    const TEST: &str = "hangs::a_cut_cable";
    if !nodes::makes_nodes(TEST, at_a_node) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    // The cable carries the heartbeats as well, so the ranks must not notice before they are asked.
    let settings = [
        ("TINYNCCL_STATUS", place),
        ("TINYNCCL_TUNE", "off"),
        ("TINYNCCL_TIMEOUT", "600"),
        ("TINYNCCL_HEARTBEAT", "60"),
    ];
    let [mut a, mut b] = ["left", "right"].map(|name| nodes::node(TEST, name, &settings));
    nodes::cable(("left", &a), ("right", &b), 1);
    // The store's host connects to itself by this address.
    for node in [&a, &b] {
        nodes::run(node, "ip link set lo up");
    }
    a.tell("go");
    b.tell("go");
    let id = a.line();
    for node in [&mut a, &mut b] {
        node.tell(&id);
    }
    assert_eq!((a.line(), b.line()), ("runs".to_owned(), "runs".to_owned()));
    nodes::run(&a, "ip link set left down");
    // Both are in one call, or one has got the last data of the call before, which the other waits for.
    let found = finding(folder.path(), |finding| {
        let all = |words: &[&str]| words.iter().all(|words| text(finding).contains(words));
        all(&["rank 0 for rank 1, rank 1 for rank 0", "its data does not arrive"])
            || all(&["it is still in all_reduce #", "where it waits for rank"])
    });
    println!("| a cut cable | {} |", text(&found));
    a.kill();
    b.kill();
    again::say("done");
}
