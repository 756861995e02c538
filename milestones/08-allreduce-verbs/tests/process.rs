//! Runs the real program, which starts its own ranks with RDMA, and prints the remedy where there is no device.

use std::process::Command;

use program_kit::testing::{self, output, skipped};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_allreduce-verbs"))
}

/// Returns true if there is a device: always without the feature `verbs`; `TINYNCCL_TEST_VERBS=1` requires one.
fn has_verbs() -> bool {
    match tinynccl::transport::rdma_ports(&tinynccl::Config::default()) {
        Ok(_) => true,
        Err(e) => {
            let must = cfg!(not(feature = "verbs")) || std::env::var_os("TINYNCCL_TEST_VERBS").is_some();
            assert!(!must, "there must be a device, but {e}");
            skipped("all-reduce over RDMA", &e.to_string());
            false
        }
    }
}

#[test]
fn three_ranks_reduce_over_rdma() {
    if !has_verbs() {
        return;
    }
    let out = output(program().args(["--ranks", "3", "--bytes", "0,4,4K,1M", "--iters", "2"]));
    assert!(out.contains("over RDMA") && out.contains("OK"), "{out}");
    // The devices have sent at least the payload, in packets of at most 4 KiB.
    let row = out.lines().find(|l| l.trim_start().starts_with("1048576 |")).expect("a row for 1 MiB");
    let packets: u64 = row.split_whitespace().nth(4).expect("a column").parse().expect("a number");
    assert!(packets >= 1_398_101 / 4096, "{row}");
}

#[cfg(not(feature = "verbs"))]
#[test]
fn without_rdma_one_line_says_what_to_do() {
    let errors =
        testing::refused(program().env("TINYROCE_DEVICES", ","), 77, &["TINYROCE_DEVICES", "TINYNCCL_TRANSPORT=auto"]);
    assert_eq!(errors.lines().count(), 1, "{errors}");
}
