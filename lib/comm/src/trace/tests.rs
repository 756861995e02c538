//! The recorder's lines: well-formed, escaped, nested, bounded.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::*;
use tinynccl_plan::schedule::Step;
use tinynccl_plan::wire::{Collective, Header};
use tinynccl_sys::backoff::Phase;
use tinynccl_sys::config::Config;

fn recorder(path: &Path, capacity: usize) -> Recorder {
    let config = Config::default().with(|c| {
        c.trace = Some(path.display().to_string());
        c.trace_events = capacity;
    });
    let sink = Sink::new(3, Run::new().unwrap(), &config).unwrap();
    sink.create().unwrap();
    Recorder::new(Tracer::new(Arc::new(sink), 5, vec![7, 3]), capacity)
}

fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
}

fn step(kind: Step<(), ()>, recv: Option<u32>, send: Option<u32>) -> StepDone {
    StepDone { kind, seq: 9, window: 1, part: 2, bytes: 3, recv, send }
}

fn call() -> Call {
    Call {
        count: 1 << 20,
        seq: 9,
        root: Header::NO_ROOT,
        windows: 8,
        message: 1 << 18,
        collective: 0,
        dtype: 0,
        op: 0,
        algorithm: 0,
    }
}

#[test]
fn a_call_is_a_slice_with_its_steps_waits_and_arrows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let mut r = recorder(&path, 100);
    let begin = r.prepare();
    r.connected(begin, 0, 4, "tcp");
    r.run_begins(1);
    r.enter(0);
    r.blocked(Some(0), None);
    r.idles(Phase::Spin, || Some(0));
    r.enter(0);
    r.blocked(None, Some(0));
    r.idles(Phase::Sleep, || Some(0));
    r.enter(0);
    r.step(step(Step::RecvCopySend { from: (), to: (), dst: () }, Some(0), Some(0)));
    r.run_ends([(call(), 1)].into_iter());
    drop(r);
    let events = events(&path);
    let named = |name: &str| {
        let mut found = events.iter().filter(|e| e["name"] == name);
        let event = found.next().unwrap_or_else(|| panic!("no {name} in {events:#?}"));
        assert!(found.next().is_none(), "two of {name}");
        event
    };
    let whole = named("all_reduce #9 4 MiB f32 sum");
    assert_eq!(whole["args"]["algorithm"], "ring");
    assert_eq!(whole["args"]["largest_message"], 1 << 18);
    let lane = named("recv_copy_send");
    for (key, value) in [("from", 7), ("to", 7), ("part", 2), ("window", 1), ("bytes", 3), ("seq", 9)] {
        assert_eq!(lane["args"][key], value, "{key}");
    }
    let inside = |inner: &Value, outer: &Value| {
        let (b, e) = span(inner);
        let (ob, oe) = span(outer);
        assert_eq!(inner["tid"], outer["tid"]);
        assert!(ob <= b && e <= oe, "{inner} in {outer}");
    };
    inside(named("wait for rank 7"), lane);
    inside(named("wait for room at rank 7"), lane);
    inside(named("connect to rank 7"), whole);
    inside(named("spin for rank 7"), whole);
    inside(named("sleep for rank 7"), whole);
    let arrows: Vec<&Value> = events.iter().filter(|e| e["cat"] == "message").collect();
    assert_eq!(arrows.len(), 2);
    assert_ne!(arrows[0]["id"], arrows[1]["id"], "one arrives, the other leaves");
    let written = named("written");
    assert_eq!(written["args"]["dropped"], 0);
}

fn span(e: &Value) -> (f64, f64) {
    let ts = e["ts"].as_f64().unwrap();
    // To the nanosecond, as readers do.
    ((ts * 1e3).floor(), (ts * 1e3).floor() + (e["dur"].as_f64().unwrap() * 1e3).floor())
}

#[test]
fn a_call_that_others_carry_is_a_slice_of_the_thread_that_made_it() {
    use tinynccl_plan::device::{Choice, Path as Way, Protocol};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    {
        let recorder = recorder(&path, 100);
        let carried = |by| Span::Carried { collective: Collective::AllReduce as u8, calls: 2, bytes: 4096, by };
        let choice = Choice { protocol: Protocol::TwoShot128, blocks: 32 };
        for by in [By::Kernels(choice), By::Path(Way::Hosted), By::Message(Way::Peer), By::Nccl] {
            let three = recorded(Some(recorder.tracer()), || carried(by), || 3);
            assert_eq!((three, recorded(None, || unreachable!(), || 4)), (3, 4));
        }
    }
    let events = events(&path);
    let slices: Vec<&Value> = events.iter().filter(|e| e["cat"] == "carried").collect();
    let by: Vec<&str> = slices.iter().map(|e| e["args"]["by"].as_str().unwrap()).collect();
    let message = "a message, kernels over the peers' memory";
    assert_eq!(by, ["kernels, LL128, two steps, 32 blocks", "through the hosts' memory", message, "NCCL"]);
    for slice in slices {
        assert_eq!(slice["name"], "all_reduce");
        assert_eq!((&slice["args"]["calls"], &slice["args"]["bytes"]), (&2.into(), &4096.into()));
    }
}

#[test]
fn a_full_recorder_says_what_it_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let mut r = recorder(&path, 10);
    r.run_begins(1);
    for _ in 0..25 {
        r.enter(0);
        r.step(step(Step::Copy { src: (), dst: () }, None, None));
    }
    r.flush(None);
    r.flush(None);
    let events = events(&path);
    assert_eq!(events.iter().filter(|e| e["name"] == "copy").count(), 10);
    let written: Vec<&Value> = events.iter().filter(|e| e["name"].as_str().unwrap().starts_with("written")).collect();
    assert_eq!(written.len(), 1, "nothing new, nothing written");
    assert_eq!(written[0]["args"]["dropped"], 15);
}

#[test]
fn a_failure_is_written_at_once_with_the_step_that_was_not_done() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let mut r = recorder(&path, 10);
    let begin = r.prepare();
    r.connected(begin, 0, 0, "shm");
    r.run_begins(1);
    r.enter(0);
    r.blocked(Some(0), None);
    r.unfinished(0, step(Step::Recv { from: (), dst: () }, Some(0), None));
    r.run_ends([(call(), 1)].into_iter());
    r.flush(Some("rank 7: \"gone\"\nsecond line \\ \u{1}"));
    let events = events(&path);
    let failed = events.iter().find(|e| e["name"] == "failed").unwrap();
    assert_eq!(failed["args"]["error"], "rank 7: \"gone\"\nsecond line \\ \u{1}");
    assert!(events.iter().any(|e| e["name"] == "recv (unfinished)"), "{events:#?}");
    assert!(events.iter().any(|e| e["name"] == "wait for rank 7"), "{events:#?}");
    assert!(!events.iter().any(|e| e["cat"] == "message"), "nothing arrived");
}

#[test]
fn the_path_names_the_rank_and_a_bad_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(recorder(&dir.path().join("t%r.json"), 1));
    assert!(dir.path().join("t3.json").exists());
    let config = Config::default().with(|c| c.trace = Some("/nowhere/t.json".to_owned()));
    let sink = Sink::new(0, Run::new().unwrap(), &config).unwrap();
    assert!(sink.create().unwrap_err().to_string().contains("/nowhere/t.json"));
}

#[test]
fn a_rank_that_shares_no_file_writes_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let config = Config::default().with(|c| c.trace = Some(path.display().to_string()));
    let run = Run::new().unwrap();
    let (first, second) = (Sink::new(0, run.clone(), &config).unwrap(), Sink::new(1, run, &config).unwrap());
    assert!(!second.join());
    first.create().unwrap();
    assert!(second.join());
    let stranger = Sink::new(2, Run::new().unwrap(), &config).unwrap();
    assert!(!stranger.join());
    stranger.create_own().unwrap();
    assert!(dir.path().join("t.json.rank2").exists());
}
