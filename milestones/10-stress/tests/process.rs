//! Runs the program as a user does.

use std::time::Duration;

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use program_kit::port::Port;

const COLLECTIVES: [&str; 11] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "scan",
    "sendrecv",
];

fn stress(line: &str) -> Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stress"));
    // Only correctness is tested: few calls, and no measurement of the links at the start.
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
fn a_run_that_does_not_fit_is_refused_before_it_starts() {
    let too_much = "-b 1024G -e 1024G -n 1 -w 0 --ranks";
    for line in [format!("{too_much} 8"), format!("{too_much} 8 --transport inproc")] {
        let assert = stress(&line).code(3);
        let text = stderr(&assert);
        assert!(text.starts_with("error: 8 ranks would need 16384.06 GiB of memory, "), "{text}");
        assert!(text.lines().count() == 1 && stdout(&assert).is_empty(), "{text}");
    }
    // A rank that somebody else has started: its world is one rank.
    let mut command = Command::new(env!("CARGO_BIN_EXE_stress"));
    command.args("-b 1024G -e 1024G --buffers fresh".split_whitespace()).env("TINYNCCL_TUNE", "0");
    let port = Port::loopback();
    command.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")]);
    command.env("MASTER_PORT", port.at.port().to_string());
    let text = stderr(&command.timeout(Duration::from_secs(120)).assert().code(3));
    assert!(text.contains("error: 1 ranks of host ") && text.contains("would need 2048.01 GiB"), "{text}");
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
        assert_eq!(rows.len(), 10 * 3 + 1, "{text}");
        for row in rows {
            assert_eq!(row[8], "0", "{row:?}");
            assert!(row[12] == "0" || row[12] == "N/A", "{row:?}");
        }
    }
}

#[test]
fn every_type_and_operator_in_threads() {
    let text = all_right("--ranks 3 --transport inproc -b 0 -e 4K -f 4096 -d all -o all -n 1 -w 0 --repetitions 1");
    assert_eq!(rows(&text).len(), (14 * 5 + 8 * 3) * 3, "{text}");
    all_right(
        "--ranks 2 --transport inproc --collective reduce_scatter,reduce,scan -r all -b 1K -e 1K -d all -o all -n 1 -w 0 --repetitions 1",
    );
}

#[test]
fn every_algorithm_and_several_worlds() {
    let run = |more: &str| {
        all_right(&format!(
            "--transport inproc --collective all -b 4 -e 40000 -f 10000 -n 1 -w 0 --repetitions 1 {more}"
        ))
    };
    for algorithm in ["ring", "tree", "double-tree", "direct", "halving-doubling", "all-pairs", "recursive-doubling"] {
        run(&format!("--ranks 5 --algo {algorithm}"));
    }
    run("--ranks 1");
    run("--ranks 4 -r all");
}

#[test]
fn neighbours_groups_and_parts_of_a_split() {
    let line = "-b 8 -e 64K -f 64 -n 2 -w 1 --repetitions 2 --collective all,pingpong,neighbours";
    for ranks in [2, 3] {
        assert_eq!(rows(&all_right(&format!("{line} --ranks {ranks}"))).len(), 12 * 3 + 1);
        assert_eq!(rows(&all_right(&format!("{line} --ranks {ranks} --group"))).len(), 12 * 3 + 1);
    }
    for (transport, split) in [("shm", "2"), ("inproc", "1,3")] {
        let text = all_right(&format!("{line} --ranks 5 --split {split} --group --transport {transport}"));
        assert!(text.contains("ranks 3 minBytes"), "the part with ranks 0, 2 and 4: {text}");
        assert_eq!(text.matches("Out of bounds values").count(), 1, "one part prints: {text}");
    }
}

#[test]
fn asynchronous_calls_and_other_seeds() {
    let text = all_right("--transport inproc --collective all -z 0 -b 1K -e 1K -n 2 -w 0 --seed 99 --repetitions 1");
    let rows = rows(&text);
    let offered = |row: &&Vec<String>| row[5] != "N/A" || row[9] != "N/A";
    // All collectives with memory: nine of eleven.
    assert_eq!(rows.iter().filter(offered).count(), 9, "{text}");
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
    for more in [
        "--buffers fresh --huge-pages",
        "--buffers reused --no-pin",
        "--buffers registered",
        "--buffers fresh --transport inproc",
    ] {
        let line =
            "--csv --place mpi --collective all,pingpong -b 8 -e 80000 -f 10000 --budget 0.002 -w 0 --repetitions 2";
        let text = all_right(&format!("{line} {more}"));
        let rows: Vec<Vec<&str>> = text
            .lines()
            .skip_while(|l| !l.starts_with("op,"))
            .filter(|l| !l.starts_with('#'))
            .map(|l| l.split(',').collect())
            .collect();
        assert_eq!(rows.len(), 1 + 11 * 2 + 1, "heading, eleven at two sizes, barrier: {text}");
        for row in &rows[1..] {
            assert_eq!(row.len(), rows[0].len(), "{row:?}");
            assert_eq!(row[2] == "in", row[0] == "broadcast", "{row:?}");
            assert_eq!(row[10], "0", "{row:?}");
            assert!(row[4].parse::<f64>().is_ok_and(|us| us > 0.0), "{row:?}");
        }
    }
    stress("--buffers symmetric --collective all_reduce,all_gather -b 64K -e 64K --transport shm --budget 0.02")
        .code(0);
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

/// The rows of `--explain`, which begin with a size and an algorithm.
fn explained(text: &str) -> Vec<Vec<String>> {
    let algorithms =
        ["ring", "tree", "double-tree", "direct", "halving-doubling", "recursive-doubling", "one-shot", "two-shot"];
    text.lines()
        .map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter(|row| row.len() > 6 && row[0].parse::<u64>().is_ok() && algorithms.contains(&row[1].as_str()))
        .collect()
}

#[test]
fn explain_names_choice_reason_and_runner_up() {
    for transport in ["inproc", "shm", "tcp"] {
        let text = stdout(
            &stress(&format!("--explain --ranks 3 --transport {transport} --collective all -r all -b 8 -e 1M -f 512"))
                .success(),
        );
        assert!(text.starts_with("# tinynccl"), "{text}");
        assert!(text.contains("cost model built in") && text.contains("ns per byte"), "{text}");
        let rows = explained(&text);
        // Five collectives without a root, four with three of them, two sizes; a barrier; nothing for sendrecv.
        assert_eq!(rows.len(), (5 + 4 * 3) * 2 + 1, "{text}");
        for row in rows {
            let time = |i: usize| row[i].parse::<f64>().unwrap_or_else(|_| panic!("{row:?}"));
            // One-shot is chosen wherever it fits; otherwise the fastest algorithm is.
            let free = row[1] != "one-shot" && row[4] != "none";
            assert!(!free || time(3) <= time(5), "the choice is the fastest: {row:?}");
            let cause = if row[1] == "one-shot" { "sync" } else { "latency" };
            assert!(row[6..].iter().any(|word| word == cause), "{row:?}");
        }
    }
    let asked = stdout(&stress("--explain --algo tree -b 8 -e 8").success());
    assert!(explained(&asked)[0][1] == "tree" && asked.contains("asked for"), "{asked}");
}

#[test]
fn explain_measures_both_and_scores_itself() {
    for transport in ["inproc", "auto"] {
        let line = "--explain --measure --collective all_reduce,all_gather,barrier -b 8 -e 8K -f 32 -n 2 -w 0";
        let text = stdout(&stress(&format!("{line} --repetitions 2 --transport {transport}")).success());
        assert!(text.contains("Estimates are off by a factor of"), "{text}");
        let rows = explained(&text);
        assert_eq!(rows.len(), 7, "{text}");
        for row in rows {
            assert!(row[6].parse::<f64>().is_ok_and(|us| us > 0.0), "{row:?}");
            assert!(row[7].parse::<f64>().is_ok_and(|us| us > 0.0), "{row:?}");
        }
    }
}

#[test]
fn a_setting_that_differs_on_one_rank_is_named_by_all() {
    let bind = "127.0.0.1:0".parse().expect("an address");
    let server = tinynccl::bootstrap::Server::start(bind, 2, &tinynccl::Config::default()).expect("a store");
    let id = server.unique_id();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_stress"));
            command.args(["-b", "8", "-e", "8"]).env("TINYNCCL_UNIQUE_ID", id.to_string()).env("TINYNCCL_TUNE", "0");
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank.to_string());
            if rank == 1 {
                command.env("TINYNCCL_ALGO", "tree");
            }
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().expect("a rank")
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().expect("its end");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "rank {rank}: {text}");
        for words in ["TINYNCCL_ALGO", "rank 0 has auto", "rank 1 has tree"] {
            assert!(text.contains(words), "rank {rank}: {text}");
        }
    }
}
