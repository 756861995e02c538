//! Runs the real program, which starts its own ranks where there is RDMA, and says what to do where there is none.

use std::io::Write;
use std::time::Duration;

use assert_cmd::Command;

/// The program, outside any launcher's environment.
fn program() -> Command {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("allreduce-verbs");
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TINYNCCL_UNIQUE_ID"]
    {
        command.env_remove(name);
    }
    command.timeout(Duration::from_secs(120));
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether this build and machine have RDMA; `TINYNCCL_TEST_VERBS=1` says that they must.
fn has_verbs() -> bool {
    match tinynccl::transport::rdma_ports(&tinynccl::Config::default()) {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {e}");
            let _ = writeln!(std::io::stderr().lock(), "SKIPPED: all-reduce over RDMA: {e}");
            false
        }
    }
}

#[test]
fn three_ranks_reduce_over_rdma() {
    if !has_verbs() {
        return;
    }
    let output = program().args(["--ranks", "3", "--bytes", "0,4,4K,1M", "--iters", "2"]).output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    assert!(out.contains("over RDMA") && out.contains("After 4 hops") && out.contains("OK"), "{out}");
    // The device has sent at least the payload, in packets of at most 4 KiB.
    let row = out.lines().find(|l| l.trim_start().starts_with("1048576 |")).expect("a row for 1 MiB");
    let packets: u64 = row.split_whitespace().nth(4).expect("a column").parse().expect("a number");
    assert!(packets >= 1_398_101 / 4096, "{row}");
}

#[test]
fn without_rdma_one_line_says_what_to_do() {
    if tinynccl::transport::rdma_ports(&tinynccl::Config::default()).is_ok() {
        return;
    }
    let output = program().output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!((output.status.code(), errors.lines().count()), (Some(77), 1), "{errors}");
    assert!(errors.contains("RDMA") && errors.contains("TINYNCCL_TRANSPORT=auto"), "{errors}");
    if cfg!(not(feature = "verbs")) {
        assert!(errors.contains("--features verbs"), "{errors}");
    }
}
