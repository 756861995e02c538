//! A page has what its trace has: counted a second time, from the JSON alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use tinynccl::{Comm, Config, ReduceOp};

use crate::recording::{Cause, Kind, Recording};
use crate::{EVENTS, page};

/// Traces ranks that are threads, each of which does the `work`.
fn traced(path: &Path, ranks: usize, algorithm: &str, work: impl Fn(&Comm) + Sync) {
    let mut config = Config::default();
    config.trace = Some(path.display().to_string());
    config.algorithm = Some(algorithm.parse().unwrap());
    (config.one_shot, config.stage) = (0, 0);
    std::thread::scope(|scope| {
        for comm in Comm::threads(ranks, config).unwrap() {
            let work = &work;
            scope.spawn(move || {
                work(&comm);
                comm.close().unwrap();
            });
        }
    });
}

fn events(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The data of a page.
fn data(page: &str) -> Value {
    let begin = page.find("id=\"data\">").unwrap() + "id=\"data\">".len();
    let end = begin + page[begin..].find("</script>").unwrap();
    serde_json::from_str(&page[begin..end]).unwrap()
}

/// Names of the slices of each thread, in the order of their begins, outside first; those of steps without their peers.
fn by_thread(events: &[Value]) -> BTreeMap<u64, Vec<String>> {
    let mut slices: BTreeMap<u64, Vec<(i64, i64, String)>> = BTreeMap::new();
    for event in events.iter().filter(|e| e["ph"] == "X") {
        let ns = |key: &str| (event[key].as_f64().unwrap() * 1e3).floor() as i64;
        let name = event["name"].as_str().unwrap().to_owned();
        slices.entry(event["tid"].as_u64().unwrap()).or_default().push((ns("ts"), -ns("dur"), name));
    }
    let names = |mut list: Vec<(i64, i64, String)>| {
        list.sort_by_key(|slice| (slice.0, slice.1));
        list.into_iter().map(|slice| slice.2).collect()
    };
    slices.into_iter().map(|(tid, list)| (tid, names(list))).collect()
}

#[test]
fn a_page_plays_every_call_message_and_step_in_the_ranks_order() {
    const RANKS: usize = 4;
    const CALLS: usize = 5;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    traced(&path, RANKS, "ring", |comm| {
        let mut values = [1.0_f32; 1000];
        (0..CALLS).for_each(|_| comm.all_reduce_in_place(&mut values, ReduceOp::Max).unwrap());
    });
    let events = events(&path);
    let count = |key: &str, value: &str| events.iter().filter(|e| e[key] == value).count();
    let run = Recording::read(&path, EVENTS).unwrap();
    assert_eq!(run.slices.len(), count("ph", "X"));
    assert_eq!((run.messages.len(), count("ph", "s")), (CALLS * RANKS * 2 * (RANKS - 1), count("ph", "f")));
    assert_eq!(run.messages.len(), count("ph", "s"));
    assert_eq!(run.calls.iter().map(|c| c.ranks).sum::<usize>(), count("cat", "call"));
    let reduces: Vec<_> = run.calls.iter().filter(|c| run.names[c.name].starts_with("all_reduce #")).collect();
    assert_eq!(reduces.len(), CALLS);
    assert!(reduces.iter().all(|c| c.ranks == RANKS) && run.notes.is_empty() && !run.cut, "{run:?}");
    let ranks: Vec<u64> = run.ranks.iter().map(|rank| rank.rank).collect();
    assert_eq!(ranks, [0, 1, 2, 3]);

    // Rounds: on each lane 7 steps per call, numbered in order.
    for (index, track) in run.tracks.iter().enumerate().filter(|(_, track)| track.name.starts_with("lane")) {
        let steps = run.slices.iter().filter(|s| s.track == index && s.kind == Kind::Step);
        let rounds: Vec<usize> = steps.map(|s| s.round).collect();
        let expected: Vec<usize> = (0..CALLS).flat_map(|_| 1..=2 * RANKS - 1).collect();
        assert_eq!(rounds, expected, "{track:?}");
    }
    // A message goes from a step that sends to one that receives it.
    for message in &run.messages {
        let (from, to) = (&run.slices[message.from], &run.slices[message.to]);
        let rank = |track: usize| run.ranks[run.tracks[track].rank].rank;
        let ends = (rank(from.track), rank(to.track));
        assert!(run.names[from.name].ends_with(&format!("to {}", ends.1)), "{}", run.names[from.name]);
        assert!(run.names[to.name].contains(&format!("from {}", ends.0)), "{}", run.names[to.name]);
        assert!(message.left <= message.there && from.begin <= message.left && message.there <= to.end);
        assert_eq!(from.bytes, to.bytes);
    }

    // The page's data: the same numbers, and each thread's slices in the trace's order.
    let data = &data(&page(&[run]))[0];
    let numbers = |key: &str| data[key].as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect::<Vec<_>>();
    let (slices, messages) = (numbers("slices"), numbers("messages"));
    assert_eq!(slices.len(), 7 * count("ph", "X"));
    assert_eq!(messages.len(), 4 * count("ph", "s"));
    let mut shown: BTreeMap<i64, Vec<String>> = BTreeMap::new();
    for slice in slices.chunks(7) {
        let name = data["names"][slice[2] as usize].as_str().unwrap();
        shown.entry(slice[0]).or_default().push(name.to_owned());
    }
    let expected = by_thread(&events);
    assert_eq!(shown.len(), expected.len());
    for (shown, expected) in shown.values().zip(expected.values()) {
        assert_eq!(shown.len(), expected.len());
        // Peers and algorithms stand behind the trace's names.
        assert!(
            shown.iter().zip(expected).all(|(shown, name)| shown.starts_with(name.as_str())),
            "{shown:?} {expected:?}"
        );
    }
}

#[test]
fn groups_and_lanes_have_rounds_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    traced(&path, 3, "tree", |comm| {
        let rank = comm.rank();
        let (mine, mut sum, mut got) = ([rank as u8; 7], [1.0_f64; 40], [0_u8; 7]);
        for _ in 0..3 {
            comm.group(|g| {
                g.send(&mine, (rank + 1) % 3)?;
                g.all_reduce_in_place(&mut sum, ReduceOp::Max)?;
                g.recv(&mut got, (rank + 2) % 3)
            })
            .unwrap();
        }
    });
    let run = Recording::read(&path, EVENTS).unwrap();
    let steps = || run.slices.iter().filter(|s| s.kind == Kind::Step);
    // A rank's message to another is one step of one call.
    for (index, _) in run.tracks.iter().enumerate() {
        let mut last = (0, 0);
        for step in steps().filter(|s| s.track == index) {
            assert!(step.round == 1 || (step.track, step.round) == (last.0, last.1 + 1), "{step:?} after {last:?}");
            last = (step.track, step.round);
        }
    }
    assert_eq!(run.calls.iter().filter(|c| run.names[c.name] == "group of 3 calls").count(), 3);
    assert!(steps().count() > 0 && steps().all(|s| s.round > 0));
}

fn line(event: Value) -> String {
    event.to_string()
}

/// A trace of one rank with these slices: `(ts, dur, cat, name)`.
fn trace(slices: &[(f64, f64, &str, &str)], others: &[Value]) -> String {
    let mut lines = vec![
        line(json!({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 0 (</title><b>, pid 1)"}})),
        line(json!({"ph": "M", "pid": 1, "tid": 10000, "name": "thread_name", "args": {"name": "calls"}})),
    ];
    lines.extend(slices.iter().map(|(ts, dur, cat, name)| {
        line(json!({"ph": "X", "pid": 1, "tid": 10000, "ts": ts, "dur": dur, "cat": cat, "name": name}))
    }));
    lines.extend(others.iter().map(Value::to_string));
    format!("[\n{}\n]\n", lines.join(",\n"))
}

fn read(text: &str, most: usize) -> anyhow::Result<Recording> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("<img src=x onerror=alert(1)>.json");
    std::fs::write(&path, text)?;
    Recording::read(&path, most)
}

#[test]
fn words_of_a_trace_stay_words() {
    let evil = "</script><script>alert(1)</script><!-- \u{2028} \\ \"";
    let failed = json!({"ph": "i", "pid": 1, "tid": 10000, "ts": 5.0, "name": "failed", "args": {"error": evil}});
    let run = read(&trace(&[(1.0, 2.0, "call", evil), (1.0, 1.0, "wait", evil)], &[failed]), EVENTS).unwrap();
    assert_eq!(run.failures[0].error, evil);
    let page = page(&[run.clone(), run]);
    assert_eq!(page.matches("<script").count(), 2, "the data and the script");
    assert_eq!(page.matches("</script").count(), 2);
    assert!(!page.contains("<img") && !page.contains("<b>") && !page.contains("http"), "nothing else came in");
    assert_eq!(data(&page)[1]["failures"][0][2], evil);
    assert!(page.contains("rank 1: &lt;/script&gt;&lt;script&gt;alert(1)"), "the list of failures");
}

#[test]
fn calls_of_one_name_are_compared_whatever_their_algorithm() {
    let of = |algorithm, us: f64| {
        let args = json!({"algorithm": algorithm, "seq": 1});
        let event = json!({"ph": "X", "pid": 1, "tid": 10000, "ts": 1.0, "dur": us, "cat": "call", "name": "barrier #1 0 B",
                           "args": args});
        read(&trace(&[], &[event]), EVENTS).unwrap()
    };
    let page = page(&[of("ring", 20.0), of("tree", 30.0)]);
    let row = "<tr><th>barrier 0 B</th><td>1</td><td>ring</td><td>20.0</td><td>1</td><td>tree</td><td>30.0</td><td>1.50</td></tr>";
    assert!(page.contains(row), "{page}");
}

#[test]
fn a_long_trace_is_cut_and_says_so() {
    let slices: Vec<_> = (0..100).map(|i| (f64::from(i), 0.5, "call", "barrier #1")).collect();
    let run = read(&trace(&slices, &[]), 30).unwrap();
    assert_eq!((run.slices.len(), run.span()), (30, (70_000, 99_500)));
    assert!(
        run.cut && run.notes[0].starts_with("Cut: the trace has 100 events, and this page plays the last 30 of them")
    );
    assert!(page(&[run]).contains("<li>Cut: the trace has 100 events"));
    let forgot = json!({"ph": "i", "pid": 1, "tid": 10000, "ts": 99.5, "name": "written", "args": {"dropped": 9}});
    let run = read(&trace(&slices, &[forgot]), EVENTS).unwrap();
    assert!(run.notes.iter().any(|note| note.contains("forgotten 9 earlier events")), "{:?}", run.notes);
    assert!(read("[]", EVENTS).unwrap_err().to_string().contains("nothing to play"));
}

#[test]
fn a_rank_that_recorded_nothing_is_named() {
    let text = trace(&[(1.0, 1.0, "wait", "wait for room at rank 7"), (3.0, 1.0, "call", "barrier of rank 9")], &[]);
    assert_eq!(read(&text, EVENTS).unwrap().notes, ["Nothing is recorded of rank 7: killed, or not traced."]);
}

#[test]
fn waits_are_told_apart_by_the_trace_s_words() {
    let of = |cat, name| read(&trace(&[(1.0, 1.0, cat, name)], &[]), EVENTS).unwrap().slices[0].kind;
    for (cat, name, cause) in [
        ("wait", "wait for rank 3", Cause::Message),
        ("wait", "wait for room at rank 3", Cause::Room),
        ("wait", "wait for the end of rank 3", Cause::Departure),
        ("wait", "lost wake-up from rank 3", Cause::LostWake),
        ("spin", "spin for rank 3", Cause::Spin),
        ("yield", "yield for rank 3", Cause::Yield),
        ("sleep", "sleep", Cause::Sleep),
        ("queue", "wait for queued calls", Cause::Queue),
        ("ddp", "wait for bucket 2", Cause::Bucket),
    ] {
        assert_eq!(of(cat, name), Kind::Wait(cause), "{name}");
    }
    assert_eq!([of("ddp", "finish"), of("carried", "all_reduce")], [Kind::Ddp, Kind::Carried]);
}

proptest! {
    /// Whatever was recorded and wherever it is cut, the indices of what is shown are right, and nothing is shown
    /// twice.
    #[test]
    fn what_is_shown_is_whole(
        steps in proptest::collection::vec((0_u32..50, 0_u32..20, 0_u64..3, 0_u8..8), 1..60),
        most in 1_usize..80,
    ) {
        let mut lines: Vec<Value> = (1..=3).flat_map(|pid| [
            json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "r"}}),
            json!({"ph": "M", "pid": pid, "tid": pid * 10_000, "name": "thread_name", "args": {"name": "lane 0"}}),
        ]).collect();
        for &(ts, dur, rank, id) in &steps {
            let (pid, tid) = (rank + 1, (rank + 1) * 10_000);
            lines.push(json!({"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "cat": "step", "name": "send"}));
            let end = if id % 2 == 0 { "s" } else { "f" };
            lines.push(json!({"ph": end, "pid": pid, "tid": tid, "ts": ts, "id": (id / 2).to_string()}));
        }
        let Ok(run) = read(&Value::Array(lines).to_string(), most) else { return Ok(()) };
        prop_assert!(run.slices.len() <= most);
        prop_assert!(run.slices.iter().all(|s| s.track < run.tracks.len() && s.name < run.names.len()));
        prop_assert!(run.messages.iter().all(|m| m.from < run.slices.len() && m.to < run.slices.len() && m.left <= m.there));
        let ids: BTreeSet<_> = run.messages.iter().map(|m| (m.from, m.to)).collect();
        prop_assert_eq!(ids.len(), run.messages.len());
        let page = page(&[run]);
        prop_assert!(data(&page).is_array());
    }
}
