//! The command `simulate`, as a process.

use std::fs;
use std::path::Path;
use std::process::Command;

use program_kit::testing;
use serde_json::Value;

fn simulate(arguments: &[&str]) -> Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    command.arg("simulate").args(arguments);
    command
}

fn output(arguments: &[&str]) -> String {
    testing::output(&mut simulate(arguments))
}

fn error(arguments: &[&str]) -> String {
    let outcome = testing::run(&mut simulate(arguments));
    assert!(!outcome.success(), "{arguments:?}: {}", outcome.stdout);
    outcome.stderr
}

const TWO_HOSTS: &str = r#"
name = "two hosts"
[[node]]
name = "a"
ranks = 1
[[node]]
name = "b"
ranks = 1
[[link]]
between = ["a", "b"]
latency_us = 2.0
bandwidth_gb_s = 1.0
"#;

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_message_between_two_hosts_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let toml = file(folder.path(), "two.toml", TWO_HOSTS);
    let json = r#"{"name": "two hosts", "node": [{"name": "a", "ranks": 1}, {"name": "b", "ranks": 1}],
                   "link": [{"between": ["a", "b"], "latency_us": 2, "bandwidth_gb_s": 1}]}"#;
    let json = file(folder.path(), "two.json", json);
    for topology in [&toml, &json] {
        let text =
            output(&["broadcast", "--algo", "direct", "-n", "2", "-s", "4K", "-t", topology, "--format", "json"]);
        let cases: Value = serde_json::from_str(&text).unwrap();
        // 2 us and 4096 bytes at 1 GB/s.
        approx::assert_abs_diff_eq!(cases[0]["time_us"].as_f64().unwrap(), 6.096, epsilon = 1e-9);
        assert_eq!(cases[0]["links"][0]["name"], "a to b");
        assert_eq!(cases[0]["links"][0]["bytes"], 4096.0);
    }
}

#[test]
fn the_example_of_the_documentation() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/topologies/two-hosts.toml");
    let text = output(&["all-reduce", "--algo", "ring", "-n", "4", "-s", "64M", "-t", path]);
    for part in ["two hosts on one switch", "transfer, shared", "cable", "shared bus0", "inside host0"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Hosts alternate between two switches: an order of the ranks that the ring does not know crosses between them four
/// times.
#[test]
fn the_limit_of_the_links_and_the_link_that_sets_it() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/topologies/dumb-bell.toml");
    let text = output(&["all-gather", "--algo", "ring", "-n", "4", "-s", "64M", "-t", path, "--format", "json"]);
    let case = &serde_json::from_str::<Value>(&text).unwrap()[0];
    // Two of four segments pass between the switches.
    approx::assert_relative_eq!(case["limit_us"].as_f64().unwrap(), 33554.432, max_relative = 1e-9);
    assert!(case["time_us"].as_f64().unwrap() > 1.4 * 33554.432, "{text}");
    assert_eq!(case["limited_by"].as_array().unwrap().len(), 1);
    let text = output(&["broadcast", "-n", "4", "-s", "64M", "-t", path]);
    assert!(text.contains("limit   67109 us, whatever the schedule: 67%; set by left to right"), "{text}");
    // Those that are computed have none yet.
    assert!(!output(&["broadcast", "-n", "4", "-t", "switch"]).contains("limit"));
}

#[test]
fn sixty_five_thousand_ranks() {
    for (topology, algorithm) in
        [("dgx", "ring"), ("dgx", "tree"), ("fat-tree", "recursive-doubling"), ("switch", "ring")]
    {
        let text = output(&["all-reduce", "--algo", algorithm, "-n", "65536", "-s", "1M", "-t", topology]);
        assert!(text.contains("65536 ranks") && text.contains("critical path"), "{text}");
    }
}

#[test]
fn tables_and_plots_over_sizes_and_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("plot.svg");
    let arguments = ["all-reduce", "--algo", "ring,tree", "-n", "8", "-s", "8,64K,16M", "--plot"];
    let text = output(&[&arguments[..], &[svg.to_str().unwrap()]].concat());
    assert_eq!(text.lines().count(), 2 + 6, "{text}");
    let drawn = fs::read_to_string(&svg).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("ring, 8 ranks") && drawn.contains("tree, 8 ranks"));
    assert!(error(&["all-reduce", "--plot", svg.to_str().unwrap()]).contains("a plot needs several sizes"));
    // auto takes the fastest of all.
    let all = output(&["all-reduce", "--algo", "all", "-n", "16", "-s", "64K", "--format", "json"]);
    let auto = output(&["all-reduce", "-n", "16", "-s", "64K", "--format", "json"]);
    let time = |case: &Value| case["time_us"].as_f64().unwrap();
    let (all, auto): (Vec<Value>, Vec<Value>) =
        (serde_json::from_str(&all).unwrap(), serde_json::from_str(&auto).unwrap());
    assert_eq!(auto.len(), 1);
    assert!(all.len() > 4 && all.iter().all(|case| time(case) >= time(&auto[0])));
}

/// As `stress` prints them for a run.
#[test]
fn bus_bandwidth_is_that_of_nccl_tests() {
    for (collective, factor) in [
        ("all-reduce", 1.5),
        ("all-gather", 0.75),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("scan", 1.0),
        ("barrier", 0.0),
    ] {
        let text = output(&[collective, "-n", "4", "-s", "64K", "-t", "switch", "--format", "json"]);
        let cases: Value = serde_json::from_str(&text).unwrap();
        let [time, algbw, busbw] = ["time_us", "algbw_gb_s", "busbw_gb_s"].map(|name| cases[0][name].as_f64().unwrap());
        approx::assert_relative_eq!(algbw, 65.536 / time, max_relative = 1e-9);
        approx::assert_relative_eq!(busbw, factor * algbw, max_relative = 1e-9);
    }
}

#[test]
fn what_is_wrong_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = |change: (&str, &str)| {
        let path = file(folder.path(), "wrong.toml", &TWO_HOSTS.replace(change.0, change.1));
        error(&["all-reduce", "-n", "2", "-t", &path])
    };
    assert!(wrong((r#"["a", "b"]"#, r#"["a", "c"]"#)).contains("link a - c: there is no node 'c'"));
    assert!(
        wrong(("bandwidth_gb_s = 1.0", "bandwidth_gb_s = -1.0"))
            .contains("bandwidth_gb_s: expected more than 0, got -1")
    );
    assert!(
        wrong(("[[link]]", "[[node]]\nname = \"c\"\nranks = 1\n[[link]]"))
            .contains("no links lead from node 'a' to node 'c'")
    );
    assert!(wrong(("latency_us", "latency")).contains("unknown field `latency`"));
    assert!(error(&["all-reduce", "-t", "nowhere.toml"]).contains("topology 'nowhere.toml': expected dgx, mesh"));
    let path = file(folder.path(), "two.toml", TWO_HOSTS);
    assert!(
        error(&["all-reduce", "-n", "3", "--algo", "ring", "-t", &path])
            .contains("two hosts has 2 ranks, 3 were asked for")
    );
    assert!(
        error(&["all-to-all", "--algo", "ring"])
            .contains("ring has no schedule for all_to_all on 8 ranks, these have: direct")
    );
    let direct = error(&["all-reduce", "--algo", "direct", "-n", "65536"]);
    assert!(direct.contains("4294901760"), "{direct}");
    assert!(error(&["broadcast", "--root", "8"]).contains("expected a rank below the number of ranks, 8"));
}
