//! The program as a user runs it.

use std::time::Duration;

use assert_cmd::Command;
use assert_cmd::assert::Assert;

const COLLECTIVES: [&str; 10] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "sendrecv",
];

fn stress(line: &str) -> Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stress"));
    // Correctness is what is tested: few calls, and no measurement of the links at the start.
    command.args(line.split_whitespace()).env("TINYNCCL_TUNE", "0").timeout(Duration::from_secs(120)).assert()
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).expect("text")
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).expect("text")
}

/// The fields of each row of the table. Lines may begin with the rank that printed them.
fn rows(text: &str) -> Vec<Vec<String>> {
    let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    text.lines()
        .filter_map(|line| {
            let mut row = fields(line);
            let numeric = |s: &String| s.bytes().all(|b| b.is_ascii_digit());
            while row.first().is_some_and(|s| !numeric(s)) && row.len() > 13 {
                row.remove(0);
            }
            (row.len() == 13 && row.first().is_some_and(numeric)).then_some(row)
        })
        .collect()
}

fn all_right(line: &str) -> String {
    let text = stdout(&stress(line).success());
    assert!(text.contains("# Out of bounds values : 0 OK"), "{line}: {text}");
    assert!(text.contains("# Avg bus bandwidth"), "{line}: {text}");
    text
}

#[test]
fn every_collective_over_processes() {
    for transport in ["tcp", "shm"] {
        let text = all_right(&format!(
            "--ranks 3 --transport {transport} --collective all -b 8 -e 64K -f 64 -n 2 -w 1 --repetitions 2"
        ));
        for name in COLLECTIVES {
            assert!(text.lines().any(|l| l.trim_end().ends_with(&format!("# {name}"))), "{name}: {text}");
        }
        let rows = rows(&text);
        assert_eq!(rows.len(), 9 * 3 + 1, "{text}");
        for row in rows {
            assert_eq!(row[8], "0", "{row:?}");
            assert!(row[12] == "0" || row[12] == "N/A", "{row:?}");
        }
    }
}

#[test]
fn every_type_and_operator_in_threads() {
    let text = all_right("--ranks 3 --transport inproc -b 0 -e 4K -f 4096 -d all -o all -n 1 -w 0 --repetitions 1");
    assert_eq!(rows(&text).len(), 10 * 5 * 3, "{text}");
    all_right(
        "--ranks 2 --transport inproc --collective reduce_scatter,reduce -r all -b 1K -e 1K -d all -o all -n 1 -w 0 --repetitions 1",
    );
}

#[test]
fn every_algorithm_and_several_worlds() {
    let run = |more: &str| {
        all_right(&format!(
            "--transport inproc --collective all -b 4 -e 40000 -f 10000 -n 1 -w 0 --repetitions 1 {more}"
        ))
    };
    for algorithm in ["ring", "tree", "double-tree", "direct", "halving-doubling"] {
        run(&format!("--ranks 5 --algo {algorithm}"));
    }
    run("--ranks 1");
    run("--ranks 4 -r all");
}

#[test]
fn asynchronous_calls_and_other_seeds() {
    let text = all_right("--transport inproc --collective all -z 0 -b 1K -e 1K -n 2 -w 0 --seed 99 --repetitions 1");
    let rows = rows(&text);
    let offered = |row: &&Vec<String>| row[5] != "N/A" || row[9] != "N/A";
    assert_eq!(rows.iter().filter(offered).count(), 6, "{text}");
}

#[test]
fn json_and_plot() {
    let directory = tempfile::tempdir().expect("a directory");
    let (json, plot) = (directory.path().join("out/a.json"), directory.path().join("out/a.svg"));
    all_right(&format!("-b 8 -e 8K -f 32 -n 3 --json {} --plot {}", json.display(), plot.display()));
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(json).expect("it is there")).expect("JSON");
    assert_eq!(record["ranks"], 2);
    assert_eq!(record["wrong"], 0);
    assert_eq!(record["rows"].as_array().map(Vec::len), Some(3));
    let row = &record["rows"][2];
    assert_eq!((&row["bytes"], &row["count"], &row["collective"]), (&8192.into(), &2048.into(), &"all_reduce".into()));
    assert_eq!(row["out_of_place"]["iterations"], 3);
    assert!(row["out_of_place"]["median"].as_f64().is_some_and(|t| t > 0.0), "{row}");
    assert!(row["algorithm"].is_string(), "{row}");
    assert!(std::fs::read_to_string(plot).expect("it is there").contains("all_reduce f32 sum"));
    assert_eq!(std::fs::read_dir(directory.path().join("out")).expect("a directory").count(), 2, "no leftovers");
}

#[test]
fn other_buffers_and_comma_separated_values() {
    for more in ["--buffers fresh --huge-pages", "--buffers reused --no-pin", "--buffers fresh --transport inproc"] {
        let line =
            "--csv --place mpi --collective all,pingpong -b 8 -e 80000 -f 10000 --budget 0.002 -w 0 --repetitions 2";
        let text = all_right(&format!("{line} {more}"));
        let rows: Vec<Vec<&str>> = text
            .lines()
            .skip_while(|l| !l.starts_with("op,"))
            .filter(|l| !l.starts_with('#'))
            .map(|l| l.split(',').collect())
            .collect();
        assert_eq!(rows.len(), 1 + 10 * 2 + 1, "heading, ten at two sizes, barrier: {text}");
        for row in &rows[1..] {
            assert_eq!(row.len(), rows[0].len(), "{row:?}");
            assert_eq!(row[2] == "in", row[0] == "broadcast", "{row:?}");
            assert_eq!(row[10], "0", "{row:?}");
            assert!(row[4].parse::<f64>().is_ok_and(|us| us > 0.0), "{row:?}");
        }
    }
    assert!(stderr(&stress("--buffers symmetric --transport inproc -e 8").code(3)).contains("memory for all ranks"));
}

#[test]
fn wrong_usage_is_said_before_any_rank_starts() {
    for line in ["-b 16 -e 8", "-o average", "--transport rdma", "--ranks 0", "-d f31", "--collective every"] {
        let assert = stress(line).code(2);
        assert!(stderr(&assert).starts_with("error: "), "{line}: {}", stderr(&assert));
    }
    let assert = stress("-r 2 --collective broadcast").code(1);
    assert_eq!(stderr(&assert).trim(), "error: -r 2: expected a rank below 2");
}

#[test]
fn files_that_cannot_be_written_are_found_out_first() {
    for transport in ["inproc", "auto"] {
        let assert = stress(&format!("--transport {transport} --json /proc/none/x.json -e 8")).code(1);
        let text = stderr(&assert);
        assert!(text.starts_with("error: cannot write /proc/none/x.json: "), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(stdout(&assert).is_empty(), "{}", stdout(&assert));
    }
}
