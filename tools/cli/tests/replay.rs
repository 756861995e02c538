//! The command `replay`, as a process.

use std::path::Path;
use std::process::Command;

use program_kit::testing::{self, output, refused};

fn replay() -> Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    command.arg("replay");
    command
}

/// A trace of two ranks, each of which recorded `calls` barriers.
fn trace(path: &Path, calls: usize) {
    let mut lines = Vec::new();
    for rank in 0..2 {
        let (pid, tid) = (rank + 1, (rank + 1) * 10_000);
        lines.push(format!(r#"{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{rank}}}}}"#));
        lines.push(format!(r#"{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{{"name":"calls"}}}}"#));
        lines.extend((0..calls).map(|i| {
            let args = format!(r#"{{"comm":0,"seq":{i}}}"#);
            format!(r#"{{"ph":"X","pid":{pid},"tid":{tid},"ts":{i}.0,"dur":0.5,"cat":"call","name":"barrier #{i}","args":{args}}}"#)
        }));
    }
    std::fs::write(path, format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
}

#[test]
fn two_runs_stand_on_one_page() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, page] = ["a.json", "b.json", "new/page.html"].map(|name| folder.path().join(name));
    trace(&a, 3);
    trace(&b, 40);
    let said = output(replay().args([&a, &b]).arg("--html").arg(&page).args(["--events", "50"]));
    assert!(said.contains("a.json: 2 ranks, 3 calls, 0 messages\n"), "{said}");
    assert!(said.contains("b.json: 2 ranks, 25 calls, 0 messages, the end of the run\n"), "{said}");
    assert!(said.contains("Cut: the trace has 80 events, and this page plays the last 50 of them"), "{said}");
    let page = std::fs::read_to_string(&page).unwrap();
    assert_eq!(page.matches("<section ").count(), 2);
    assert!(page.contains("<th>second / first</th>") && page.contains("Cut: the trace has 80 events"));
}

#[test]
fn what_cannot_be_read_leaves_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let [good, bad, page] = ["a.json", "b.json", "page.html"].map(|name| folder.path().join(name));
    trace(&good, 1);
    std::fs::write(&bad, "no trace").unwrap();
    refused(
        replay().args([&good, &bad]).arg("--html").arg(&page),
        1,
        &["b.json: ", "as TINYNCCL_TRACE=FILE writes it"],
    );
    assert!(!page.exists());
    refused(replay().arg("/nowhere.json").arg("--html").arg(&page), 1, &["/nowhere.json"]);
    refused(replay().args([&good, &good, &good]).arg("--html").arg(&page), 2, &[]);
    refused(replay().arg(&good).arg("--html").arg(&page).args(["--events", "0"]), 2, &["1 to 1000000"]);
}
