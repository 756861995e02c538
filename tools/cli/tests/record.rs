//! The last calls of each rank, as files: asked for, at a failure, at SIGUSR1; and PyTorch's analyser on them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use program_kit::testing;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::status::{Job, LONG, status, text};

/// The records in a folder, by rank; all of one job.
fn records(folder: &Path) -> Vec<(PathBuf, Value)> {
    let mut found = Vec::new();
    for job in std::fs::read_dir(folder).into_iter().flatten() {
        let files = std::fs::read_dir(job.unwrap().path()).unwrap().map(|file| file.unwrap().path());
        for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "json")) {
            let record = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
            found.push((file, record));
        }
    }
    found.sort_by_key(|(_, record): &(PathBuf, Value)| record["rank"].as_u64());
    found
}

/// Waits until this many ranks have written their records.
fn wait_for(folder: &Path, ranks: usize) -> Vec<(PathBuf, Value)> {
    let begin = Instant::now();
    loop {
        let found = records(folder);
        if found.len() == ranks {
            return found;
        }
        assert!(begin.elapsed() < LONG, "{found:?}");
        std::thread::yield_now();
    }
}

/// Name, number and state of the calls of a record's first communicator.
fn calls(record: &Value) -> Vec<String> {
    let calls = record["calls"][0].as_array().unwrap();
    calls
        .iter()
        .map(|call| format!("{} #{} {}", call["name"], call["number"], call["state"]).replace('"', ""))
        .collect()
}

/// A job whose rank 2 does not come to the second call, and its records.
fn absent() -> (Job, TempDir) {
    let job = Job::start(3, "absent");
    let stuck = |finding: &Value| {
        text(finding).contains("ranks 0, 1 wait in all_reduce #2")
            && text(finding).contains("broadcast #1, which ended")
    };
    job.finding(stuck);
    let folder = tempfile::tempdir().unwrap();
    let outcome = job.status(&["--dump", folder.path().to_str().unwrap()]);
    assert!(outcome.code == Some(0) && outcome.stdout.contains("the last calls of ranks 0, 1, 2"), "{outcome:?}");
    (job, folder)
}

#[test]
fn the_last_calls_are_written_when_somebody_asks() {
    let (job, folder) = absent();
    let found = records(folder.path());
    let all: Vec<_> = found.iter().map(|(_, record)| calls(record)).collect();
    let waits = ["broadcast #1 over", "all_reduce #2 begun"];
    assert_eq!(all, [&waits[..], &waits[..], &waits[..1]]);
    for (file, record) in &found {
        let rank = record["rank"].as_u64().unwrap() as usize;
        assert!(file.ends_with(format!("rank_{rank}.json")) && record["report"]["pid"] == job.pid(rank), "{record}");
        let first = &record["calls"][0][0];
        assert_eq!((&first["dtype"], &first["count"], &first["root"]), (&"f32".into(), &1.into(), &0.into()));
    }
    // A call that waits has its time.
    let [waits, at] = [&found[0].1["calls"][0][1]["begun_ns"], &found[0].1["at_ns"]].map(|ns| ns.as_u64().unwrap());
    assert!(waits > at - 3_600_000_000_000 && waits <= at, "{waits} {at}");
    // One process alone, and afterwards the view, when no process is left.
    let one = tempfile::tempdir().unwrap();
    let outcome = job.status(&[&job.pid(1).to_string(), "--dump", one.path().to_str().unwrap()]);
    assert!(outcome.code == Some(0) && records(one.path()).len() == 1, "{outcome:?}");
    drop(job);
    let view = status(Path::new("off"), &["--after", "0", folder.path().to_str().unwrap()]);
    assert_eq!(view.code, Some(1), "{view:?}");
    for words in ["ranks 0, 1 wait in all_reduce #2", "rank 2 has not made it", "its last call was broadcast #1"] {
        assert!(view.stdout.contains(words), "{words:?}: {}", view.stdout);
    }
    let none = status(Path::new("off"), &[tempfile::tempdir().unwrap().path().to_str().unwrap()]);
    assert!(none.code == Some(1) && none.stderr.contains("there are no records"), "{none:?}");
}

#[test]
fn messages_are_recorded_with_their_ends() {
    let job = Job::start(2, "messages");
    job.finding(|finding| text(finding).contains("rank 0 waits for rank 1 in recv #3 (f32, count 8, from rank 1)"));
    let folder = tempfile::tempdir().unwrap();
    job.status(&["--dump", folder.path().to_str().unwrap()]);
    let found = records(folder.path());
    let all: Vec<_> = found.iter().map(|(_, record)| calls(record)).collect();
    let first = ["send #1 over", "recv #2 over", "recv #3 begun"];
    let second = ["recv #1 over", "send #2 over"];
    assert_eq!(all, [&first[..], &second[..]]);
    let call = &found[0].1["calls"][0][2];
    assert_eq!((&call["from"], &call["message"], &call["count"]), (&1.into(), &2.into(), &8.into()));
}

#[test]
fn every_rank_writes_its_last_calls_when_the_job_fails() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::with(2, "count", &[("TINYNCCL_DUMP", folder.path().to_str().unwrap())]);
    for (_, record) in wait_for(folder.path(), 2) {
        let why = record["why"].as_str().unwrap();
        assert!(why.contains("has failed: ") && why.contains("count 8") && why.contains("count 9"), "{why}");
        assert_eq!(calls(&record), ["all_reduce #1 begun"]);
        assert!(record["report"]["comms"][0]["failure"].as_str().is_some_and(|text| text.contains("count 9")));
    }
    drop(job);
}

#[test]
fn a_rank_that_is_killed_makes_the_others_write_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::with(3, "absent", &[("TINYNCCL_DUMP", folder.path().to_str().unwrap())]);
    job.finding(|finding| text(finding).contains("ranks 0, 1 wait in all_reduce #2"));
    assert_eq!(records(folder.path()).len(), 0, "nothing has failed");
    job.signal(2, Signal::KILL);
    let found = wait_for(folder.path(), 2);
    assert!(found.iter().all(|(_, record)| record["why"].as_str().unwrap().contains("rank 2")), "{found:?}");
}

#[test]
fn a_signal_makes_a_rank_write_its_last_calls_unless_the_program_has_a_use_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::with(2, "absent", &[("TINYNCCL_DUMP", folder.path().to_str().unwrap())]);
    job.finding(|finding| text(finding).contains("rank 0 waits in all_reduce #2"));
    job.signal(0, Signal::USR1);
    let (_, record) = wait_for(folder.path(), 1).pop().unwrap();
    assert_eq!((&record["why"], &record["rank"]), (&"SIGUSR1".into(), &0.into()));
    // It goes on waiting.
    job.finding(|finding| text(finding).contains("rank 0 waits in all_reduce #2"));

    let kept = tempfile::tempdir().unwrap();
    let job = Job::with(2, "ignore", &[("TINYNCCL_DUMP", kept.path().to_str().unwrap())]);
    job.finding(|finding| text(finding).contains("rank 0 waits in all_reduce #2"));
    job.signal(0, Signal::USR1);
    // Its answer comes from the thread that would have written the record first.
    job.finding(|finding| text(finding).contains("rank 0 waits in all_reduce #2"));
    assert_eq!(records(kept.path()).len(), 0);
}

/// The output of PyTorch's analyser on the records of a folder; `None` where it is not there.
fn analyser(folder: &Path) -> Option<String> {
    let python = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command.args(["-m", "torch.distributed.flight_recorder.fr_trace"]).args(arguments).output()
    };
    if !python(&["--help"]).is_ok_and(|output| output.status.success()) {
        return None;
    }
    let (file, _) = records(folder).pop().unwrap();
    let output = python(&[file.parent().unwrap().to_str().unwrap()]).unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn the_pickles_are_what_python_reads() {
    let (_job, folder) = absent();
    let (file, _) = records(folder.path()).swap_remove(1);
    let script = "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))))";
    let output = Command::new("python3").args(["-c", script]).arg(file.with_file_name("fr_rank_1")).output();
    let Ok(output) = output else { return testing::skipped("pickles read by Python", "there is no python3") };
    let dump: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_eq!(dump["pg_config"]["0"]["ranks"], "[0, 1, 2]");
    let entries = dump["entries"].as_array().unwrap();
    let names: Vec<_> = entries.iter().map(|entry| (&entry["profiling_name"], &entry["state"])).collect();
    let text = |text: &str| Value::from(text);
    let expected = [[text("nccl:broadcast"), text("completed")], [text("nccl:all_reduce"), text("started")]];
    assert_eq!(names, expected.each_ref().map(|[name, state]| (name, state)));
    assert_eq!((&entries[1]["input_sizes"], &entries[1]["collective_seq_id"]), (&serde_json::json!([[8]]), &2.into()));
    assert_eq!(entries[1]["time_discovered_completed_ns"], Value::Null);
    assert_eq!(entries[0]["process_group"], serde_json::json!(["0", "undefined"]));
}

#[test]
fn pytorchs_analyser_names_the_rank_that_is_missing() {
    let (_job, folder) = absent();
    let Some(said) = analyser(folder.path()) else {
        return testing::skipped("PyTorch's analyser", "python3 has no torch.distributed.flight_recorder (2.15)");
    };
    println!("{said}");
    for words in ["Not all ranks joining collective", "sequence number: 2", "nccl:all_reduce", "missing ranks: {2}"] {
        assert!(said.contains(words), "{words:?}: {said}");
    }
}

#[test]
fn pytorchs_analyser_names_calls_that_differ() {
    let folder = tempfile::tempdir().unwrap();
    let _job = Job::with(2, "count", &[("TINYNCCL_DUMP", folder.path().to_str().unwrap())]);
    wait_for(folder.path(), 2);
    let view = status(Path::new("off"), &["--torch", folder.path().to_str().unwrap()]);
    assert!(view.stdout.contains("it has failed on"), "{view:?}");
    let Some(said) = analyser(folder.path()) else {
        return testing::skipped("PyTorch's analyser", "python3 has no torch.distributed.flight_recorder (2.15)");
    };
    println!("{said}");
    for words in ["sequence number: 1 has errors", "SIZE_OR_SYNTAX_MISMATCH", "[[8]]", "[[9]]"] {
        assert!(said.contains(words), "{words:?}: {said}");
    }
}
