//! Runs the real program: it starts its own ranks.

use std::process::Command;

use program_kit::port::Port;
use program_kit::testing::{self, output, refused};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_lib-hello"))
}

/// Runs `ranks` ranks over `transport` and returns the output.
fn hello(ranks: usize, transport: &str) -> String {
    output(program().args(["--ranks", &ranks.to_string(), "--transport", transport]))
}

#[test]
fn two_ranks_over_each_transport() {
    for transport in ["auto", "tcp", "shm"] {
        let out = hello(2, transport);
        assert!(out.contains("OK: world of size 2"), "{out}");
        for rank in 0..2 {
            assert!(out.contains(&format!("rank {rank} of 2: all_reduce of my {} gave 3", rank + 1)), "{out}");
            assert!(out.contains(&format!("the ring brought \"hello from rank {rank}\"")), "{out}");
        }
        let carrier = if transport == "tcp" { "over tcp" } else { "over shm" };
        assert!(out.contains(carrier), "{out}");
    }
}

#[test]
fn one_and_three_ranks() {
    assert!(hello(1, "auto").contains("OK: world of size 1"));
    assert!(hello(3, "auto").contains("gave 6"));
}

#[test]
fn a_link_of_our_own_carries_the_same_program() {
    let out = output(program().args(["--own-link", "--ranks", "3"]));
    assert!(out.contains("OK: world of size 3"), "{out}");
    assert_eq!(out.matches(" over a link of your own (--own-link)").count(), 3, "{out}");
}

#[test]
fn an_environment_like_torchruns_is_enough() {
    let held = Port::loopback();
    let port = held.at.port();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            std::thread::spawn(move || {
                let mut rank_of_two = program();
                rank_of_two
                    .envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string()), ("WORLD_SIZE", "2".into())])
                    .envs([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())]);
                output(&mut rank_of_two)
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
}

#[test]
fn a_variable_that_nothing_reads_is_one_warning_for_all_ranks() {
    let outcome = program_kit::testing::run(program().args(["--ranks", "3"]).env("TINYNCCL_TIMEOUTS", "5"));
    assert!(outcome.success(), "{}", outcome.stderr);
    let said = "TINYNCCL_TIMEOUTS is set, and nothing reads it: did you mean TINYNCCL_TIMEOUT?";
    assert_eq!(outcome.stderr.matches(said).count(), 1, "{}", outcome.stderr);
}

#[test]
fn bad_input_is_one_line_and_a_code() {
    refused(program().args(["--ranks", "0"]), 2, &["0 is not in 1..=256"]);
    refused(program().args(["--transport", "pigeon"]), 2, &["expected auto, tcp, shm or verbs"]);
    refused(program().arg("--nonsense"), 2, &["--nonsense"]);
    refused(program().env("TINYNCCL_TIMEOUT", "soon"), 1, &["error: TINYNCCL_TIMEOUT", "soon"]);
    refused(program().env("RANK", "5").env("WORLD_SIZE", "2"), 1, &["error:", "RANK"]);
}

#[test]
fn a_replay_has_every_ranks_calls() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("run.html");
    let outcome = testing::run(program().args(["--ranks", "3", "--replay"]).arg(&page));
    assert!(outcome.success(), "{}{}", outcome.stdout, outcome.stderr);
    let said = outcome.stderr.lines().find(|line| line.starts_with("replay: ")).expect("a line").to_owned();
    assert!(said.contains(" plays 3 ranks, ") && said.ends_with("run.trace.json"), "{said}");
    let page = std::fs::read_to_string(page).unwrap();
    let trace = std::fs::read_to_string(folder.path().join("run.trace.json")).unwrap();
    let calls = trace.matches("\"cat\":\"call\",\"name\":\"all_reduce #").count();
    assert_eq!((calls, page.matches("\"all_reduce #").count()), (3, 1), "one call, of three ranks");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else");
}

#[test]
fn a_replay_that_cannot_be_made_is_refused_before_any_rank_starts() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("run.html");
    let replay = |name: &str, value: &str, code, words: &[&str]| {
        refused(program().args(["--ranks", "1", "--replay"]).arg(&page).env(name, value), code, words)
    };
    replay("TINYNCCL_TRACE", "t-%r.json", 2, &["--replay reads one trace", "%r"]);
    replay("OMPI_COMM_WORLD_RANK", "0", 2, &["another launcher started this rank", "tinynccl-cli replay FILE --html"]);
    refused(program().args(["--replay", "/proc/none/x.html"]), 1, &["cannot write /proc/none/x.html"]);
    // A run that makes no communicator has no page.
    let said = replay("TINYNCCL_TIMEOUT", "soon", 1, &["TINYNCCL_TIMEOUT", "replay: no page"]);
    assert!(!page.exists(), "{said}");
}
