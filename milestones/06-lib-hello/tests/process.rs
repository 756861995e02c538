//! Runs the real program: it starts its own ranks.

use std::process::Command;

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
fn an_environment_like_torchruns_is_enough() {
    // A free port: bound, then given back.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
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
