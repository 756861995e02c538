//! Trace files: complete, nested, on one clock, with an arrow for every message.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::{Fabric, config, run, run_ok};
use program_kit::port::Port;
use serde_json::Value;
use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::process_group::ProcessGroup;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, Error, ReduceOp, Result};

fn traced(path: &Path) -> Config {
    let mut config = config();
    config.trace = Some(path.display().to_string());
    config.algorithm = Some(Algorithm::Ring);
    config
}

/// A slice; times in nanoseconds.
#[derive(Debug, Clone)]
struct Slice {
    rank: u64,
    tid: u64,
    begin: i64,
    end: i64,
    name: String,
    cat: String,
    args: Value,
}

/// One end of an arrow.
#[derive(Debug, Clone)]
struct End {
    rank: u64,
    tid: u64,
    at: i64,
}

#[derive(Debug, Default)]
struct Trace {
    slices: Vec<Slice>,
    sent: HashMap<String, End>,
    received: HashMap<String, End>,
    processes: BTreeMap<u64, String>,
    threads: HashMap<u64, String>,
    /// Events that are neither slices, arrows nor names.
    others: Vec<Value>,
}

/// Nanoseconds, as Perfetto computes them.
fn ns(value: &Value) -> i64 {
    (value.as_f64().expect("a number") * 1000.0) as i64
}

impl Trace {
    fn read(path: &Path) -> Trace {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let events: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"));
        let mut trace = Trace::default();
        for e in events {
            let rank = e["pid"].as_u64().expect("pid") - 1;
            let tid = || e["tid"].as_u64().expect("tid");
            let text = |key: &str| e[key].as_str().unwrap_or_else(|| panic!("no {key} in {e}")).to_owned();
            let end = || End { rank, tid: tid(), at: ns(&e["ts"]) };
            match e["ph"].as_str().expect("ph") {
                "X" => trace.slices.push(Slice {
                    rank,
                    tid: tid(),
                    begin: ns(&e["ts"]),
                    end: ns(&e["ts"]) + ns(&e["dur"]),
                    name: text("name"),
                    cat: text("cat"),
                    args: e["args"].clone(),
                }),
                "s" => assert!(trace.sent.insert(text("id"), end()).is_none(), "sent twice: {e}"),
                "f" => assert!(trace.received.insert(text("id"), end()).is_none(), "received twice: {e}"),
                "M" if e["name"] == "process_name" => {
                    trace.processes.insert(rank, e["args"]["name"].as_str().expect("name").to_owned());
                }
                "M" if e["name"] == "thread_name" => {
                    trace.threads.insert(tid(), e["args"]["name"].as_str().expect("name").to_owned());
                }
                "M" => {}
                _ => trace.others.push(e),
            }
        }
        trace.check();
        trace
    }

    /// Asserts the properties of every trace of a run that ended well.
    fn check(&self) {
        let mut tracks: BTreeMap<u64, Vec<&Slice>> = BTreeMap::new();
        for slice in &self.slices {
            assert!(slice.begin < slice.end, "{slice:?}");
            assert!(self.threads.contains_key(&slice.tid), "track without a name: {slice:?}");
            tracks.entry(slice.tid).or_default().push(slice);
        }
        for (tid, slices) in tracks {
            assert_eq!(slices.iter().map(|s| s.rank).collect::<BTreeSet<_>>().len(), 1, "ranks share track {tid}");
            // Stable, as Perfetto sorts: what begins together must be in the file outside first.
            let mut slices = slices;
            slices.sort_by_key(|s| s.begin);
            let mut open: Vec<&Slice> = Vec::new();
            for slice in slices {
                open.retain(|outer| outer.end > slice.begin);
                if let Some(outer) = open.last() {
                    assert!(slice.end <= outer.end, "{slice:?} sticks out of {outer:?}");
                }
                open.push(slice);
            }
        }
        let ids = |m: &HashMap<String, End>| m.keys().cloned().collect::<BTreeSet<String>>();
        assert_eq!(ids(&self.sent), ids(&self.received), "arrows with one end");
        for (id, sent) in &self.sent {
            let received = &self.received[id];
            let (from, to) = (self.innermost(sent), self.innermost(received));
            assert!(from.name.contains("send") && to.name.contains("recv"), "{from:?} -> {to:?}");
            assert_eq!(from.args["to"], received.rank, "{from:?}");
            assert_eq!(to.args["from"], sent.rank, "{to:?}");
            assert_eq!(from.args["bytes"], to.args["bytes"]);
            assert!(sent.at <= received.at, "{to:?} ends before {from:?} could have sent");
        }
    }

    fn innermost(&self, end: &End) -> &Slice {
        let around = self.slices.iter().filter(|s| s.tid == end.tid && s.begin <= end.at && end.at < s.end);
        around.min_by_key(|s| s.end - s.begin).unwrap_or_else(|| panic!("no slice around {end:?}"))
    }

    fn on(&self, rank: usize, cat: &str) -> Vec<&Slice> {
        self.slices.iter().filter(|s| s.rank == rank as u64 && s.cat == cat).collect()
    }

    fn count(&self, rank: usize, name: &str) -> usize {
        self.slices.iter().filter(|s| s.rank == rank as u64 && s.name == name).count()
    }
}

/// Three ranks, `calls` ring all_reduces each.
fn check_ring(trace: &Trace, calls: usize) {
    const N: usize = 3;
    assert_eq!(trace.processes.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    for rank in 0..N {
        assert!(trace.processes[&(rank as u64)].starts_with(&format!("rank {rank} (")), "{:?}", trace.processes);
        let named: Vec<&Slice> =
            trace.on(rank, "call").into_iter().filter(|s| s.name.starts_with("all_reduce")).collect();
        assert_eq!(named.len(), calls);
        assert!(named.iter().all(|s| s.args["algorithm"] == "ring" && s.args["bytes"] == 4000), "{named:?}");
        let steps = trace.on(rank, "step");
        // One step sends first, n-2 pass on sums, one finishes a part and passes it on, n-2 pass on results, one
        // receives.
        let per_call = [
            ("send", 1),
            ("recv_reduce_send", N - 2),
            ("recv_reduce_copy_send", 1),
            ("recv_copy_send", N - 2),
            ("recv", 1),
        ];
        assert_eq!(steps.len(), calls * per_call.iter().map(|(_, n)| n).sum::<usize>());
        for (name, n) in per_call {
            assert_eq!(trace.count(rank, name), calls * n, "{name} on rank {rank}");
        }
        let of = |ends: &HashMap<String, End>| ends.values().filter(|e| e.rank == rank as u64).count();
        assert_eq!(of(&trace.sent), calls * 2 * (N - 1), "messages sent by rank {rank}");
        assert_eq!(of(&trace.received), calls * 2 * (N - 1), "messages received by rank {rank}");
        // A step lies inside its call.
        for step in steps {
            let call = named.iter().find(|c| c.args["seq"] == step.args["seq"]).expect("the step's call");
            assert!(call.begin <= step.begin && step.end <= call.end, "{step:?} outside {call:?}");
        }
        assert!(trace.on(rank, "setup").iter().any(|s| s.name.starts_with("connect to rank ")));
    }
}

fn all_reduces(comm: &Comm, calls: usize) -> Result<()> {
    let mut buffer = vec![1.0f32; 1000];
    (0..calls).try_for_each(|_| comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))
}

#[test]
fn ring_on_threads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    run_ok(Fabric::Inproc, 3, &traced(&path), |comm| all_reduces(&comm, 4));
    check_ring(&Trace::read(&path), 4);
}

#[test]
fn ring_over_every_network() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        run_ok(fabric, 3, &traced(&path), |comm| all_reduces(&comm, 4));
        check_ring(&Trace::read(&path), 4);
    }
}

/// The rank of the process test; does nothing unless it is started as one.
#[test]
fn child_process() {
    if std::env::var_os("TINYNCCL_TRACE").is_some() {
        let comm = Comm::from_env().unwrap();
        all_reduces(&comm, 5).unwrap();
        comm.close().unwrap();
    }
}

fn processes(ranks: usize, trace: &str) -> Vec<std::process::Output> {
    let port = Port::loopback();
    let children: Vec<_> = (0..ranks)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "trace::child_process", "--nocapture", "--test-threads=1"])
                .envs(port.environment(rank, ranks))
                .envs([("TINYNCCL_TRACE", trace), ("TINYNCCL_ALGO", "ring"), ("TINYNCCL_TUNE", "0")])
                .envs([("TINYNCCL_TIMEOUT", "30"), ("TINYNCCL_CONNECT_TIMEOUT", "30")])
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

#[test]
fn ring_on_processes_is_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    for output in processes(3, &path.display().to_string()) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let trace = Trace::read(&path);
    check_ring(&trace, 5);
    let pids: BTreeSet<&str> = trace.processes.values().map(|p| p.rsplit("pid ").next().unwrap()).collect();
    assert_eq!(pids.len(), 3, "{:?}", trace.processes);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no file beside it");
}

#[test]
fn a_path_that_cannot_be_written_is_an_error_of_every_rank_at_the_start() {
    for output in processes(2, "/nowhere/at/all.json") {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("/nowhere/at/all.json"), "{said}");
    }
    let error = Comm::threads(2, traced(Path::new("/nowhere/at/all.json"))).unwrap_err().to_string();
    assert!(error.contains("/nowhere/at/all.json") && error.contains("TINYNCCL_TRACE"), "{error}");
}

#[test]
fn one_file_per_rank_where_the_path_says_so() {
    let dir = tempfile::tempdir().unwrap();
    run_ok(Fabric::Shm, 2, &traced(&dir.path().join("t-%r.json")), |comm| comm.barrier());
    for rank in 0..2 {
        let text = std::fs::read_to_string(dir.path().join(format!("t-{rank}.json"))).unwrap();
        let events: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert!(events.iter().all(|e| e["pid"] == rank + 1));
        assert!(events.iter().any(|e| e["cat"] == "step"));
    }
}

#[test]
fn ranks_that_do_not_trace_need_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let server = tinynccl::bootstrap::Server::start("127.0.0.1:0".parse().unwrap(), 3, &config()).unwrap();
    let id = server.unique_id();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let mut config = traced(&path);
            config.trace = config.trace.filter(|_| rank > 0);
            let id = id.clone();
            scope.spawn(move || Comm::init(&id, rank, 3, config).unwrap().barrier().unwrap());
        }
    });
    let text = std::fs::read_to_string(&path).unwrap();
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let pids: BTreeSet<u64> = events.iter().map(|e| e["pid"].as_u64().unwrap()).collect();
    assert_eq!(pids.into_iter().collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn groups_point_to_point_splits_and_queued_calls() {
    for fabric in [Fabric::Inproc, Fabric::Tcp] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        run_ok(fabric, 4, &traced(&path), |comm| {
            let (rank, n) = (comm.rank(), comm.size());
            let (mine, mut theirs, mut sum) = ([rank as u32; 70_000], [0u32; 70_000], [1.0f64; 300]);
            comm.group(|g| {
                g.send(&mine, (rank + 1) % n)?;
                g.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
                g.recv(&mut theirs, (rank + n - 1) % n)
            })?;
            assert_eq!(theirs[0] as usize, (rank + n - 1) % n);
            let half = comm.split(Some((rank % 2) as u32), 0)?.expect("everybody has a colour");
            half.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            let work = half.all_reduce_in_place_async(vec![1i32; 10], ReduceOp::Sum)?;
            half.barrier()?;
            assert_eq!(work.wait()?, [2; 10]);
            half.close()?;
            comm.barrier()
        });
        let trace = Trace::read(&path);
        for rank in 0..4 {
            let calls: Vec<&str> = trace.on(rank, "call").iter().map(|s| s.name.as_str()).collect();
            assert!(calls.contains(&"group of 3 calls"), "{calls:?}");
            assert_eq!(calls.iter().filter(|c| c.starts_with("send/recv #1 273.4 KiB u32")).count(), 2, "{calls:?}");
            assert_eq!(calls.iter().filter(|c| c.starts_with("barrier")).count(), 2, "{calls:?}");
            let tracks: BTreeSet<&str> =
                trace.slices.iter().filter(|s| s.rank == rank as u64).map(|s| trace.threads[&s.tid].as_str()).collect();
            // The number that its first rank gave out, see `comm::state::numbers`.
            let child = format!("comm {} calls", 4 + rank % 2);
            assert!(tracks.contains("calls") && tracks.contains(child.as_str()), "{tracks:?}");
            let peer = (rank + 2) % 4;
            let child = trace.slices.iter().filter(|s| s.rank == rank as u64 && trace.threads[&s.tid].contains("comm"));
            let peers: BTreeSet<u64> = child.filter_map(|s| s.args["to"].as_u64()).collect();
            assert_eq!(peers.into_iter().collect::<Vec<_>>(), [peer as u64], "world ranks, also after a split");
            let queued = trace.others.iter().filter(|e| e["pid"] == rank + 1 && e["name"] == "queued all_reduce");
            assert_eq!(queued.count(), 2, "begin and end");
        }
    }
}

#[test]
fn calls_in_memory_that_all_ranks_map() {
    for fabric in [Fabric::Inproc, Fabric::Shm] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        let mut config = traced(&path);
        config.algorithm = None;
        run_ok(fabric, 3, &config, |comm| all_reduces(&comm, 20));
        let trace = Trace::read(&path);
        for rank in 0..3 {
            let calls: Vec<&Slice> = trace.on(rank, "call");
            assert_eq!(calls.len(), 20);
            assert!(calls.iter().all(|c| c.args["algorithm"] == "one-shot"), "{calls:?}");
        }
        assert!(trace.slices.iter().any(|s| s.name.starts_with("wait for rank ")), "somebody comes last");
    }
}

#[test]
fn buckets_of_data_parallel_training() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    run_ok(Fabric::Inproc, 2, &traced(&path), |comm| {
        let params: Vec<ParamSpec> = (0..3).map(|i| ParamSpec { name: format!("p{i}"), len: 100 }).collect();
        let mut options = DdpOptions::default();
        options.bucket_bytes = 400;
        let group = ProcessGroup::from(comm);
        let mut ddp = Ddp::new(&group, &params, options)?;
        for _ in 0..2 {
            (0..3).rev().try_for_each(|i| ddp.ready(i))?;
            ddp.finish()?;
        }
        Ok(())
    });
    let trace = Trace::read(&path);
    for rank in 0..2 {
        for (name, count) in [("bucket 2 ready", 2), ("wait for bucket 0", 2), ("finish", 2)] {
            assert_eq!(trace.count(rank, name), count, "{name}");
        }
        let calls = trace.on(rank, "call");
        assert_eq!(calls.iter().filter(|s| s.name.contains("400 B f32 avg")).count(), 6, "{calls:?}");
    }
}

#[test]
fn a_call_that_times_out_is_in_the_file_before_the_communicator_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let mut config = traced(&path);
    config.timeout = Duration::from_millis(300);
    let all_done = std::sync::Barrier::new(3);
    let timeouts = run(Fabric::Inproc, 3, &config, |comm| {
        all_reduces(&comm, 1).expect("all are there");
        let outcome = if comm.rank() < 2 { comm.barrier() } else { Ok(()) };
        // No thread writes between the two: each rank has written its failure, none is dropped.
        all_done.wait();
        let text = std::fs::read_to_string(&path).expect("a file");
        all_done.wait();
        let Err(error @ Error::Timeout { .. }) = outcome else { return 0 };
        let events: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        let mine = || events.iter().filter(|e| e["pid"] == comm.rank() + 1);
        let failed = mine().find(|e| e["name"] == "failed").expect("the failure");
        assert_eq!(failed["args"]["error"], error.to_string());
        assert!(mine().any(|e| e["name"].as_str().is_some_and(|n| n.ends_with("(unfinished)"))), "the step");
        assert!(mine().any(|e| e["cat"] == "sleep"), "what the rank did");
        1
    });
    assert!(timeouts.iter().sum::<usize>() > 0, "a rank gave up by itself");
}

#[test]
fn memory_is_bounded_and_the_last_events_stay() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let mut config = traced(&path);
    config.trace_events = 64;
    run_ok(Fabric::Inproc, 2, &config, |comm| all_reduces(&comm, 200));
    let events: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for pid in [1, 2] {
        let mine = || events.iter().filter(|e| e["pid"] == pid);
        assert!(mine().filter(|e| e["ph"] == "X").count() <= 64);
        assert!(mine().any(|e| e["name"].as_str().is_some_and(|n| n.starts_with("all_reduce #200 "))), "the last call");
        let dropped: u64 = mine().filter_map(|e| e["args"]["dropped"].as_u64()).sum();
        assert!(dropped > 200, "{dropped}");
    }
}
