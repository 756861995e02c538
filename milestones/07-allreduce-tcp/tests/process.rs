//! Runs the real program: it starts its own ranks.

use std::time::Duration;

use assert_cmd::Command;

/// The program, outside any launcher's environment.
fn program() -> Command {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("allreduce-tcp");
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

/// Fails with `code` and says each of `words` on standard error.
fn refused(command: &mut Command, code: i32, words: &[&str]) {
    let output = command.output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    for word in words {
        assert!(errors.contains(word), "no {word:?} in: {errors}");
    }
}

#[test]
fn two_ranks_show_the_schedule_and_the_table() {
    let output = program().args(["--ranks", "2", "--bytes", "0,4,4K,1M", "--iters", "2"]).output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    assert!(out.contains("send in[0.0] → 1"), "{out}");
    assert!(out.contains("After 2 hops, 2(n-1): every rank holds every part's sum"), "{out}");
    // 2(n-1)/n of 1 MiB is 1 MiB with two ranks, by the schedule and by the formula.
    let row = out.lines().find(|l| l.trim_start().starts_with("1048576 |")).expect("a row for 1 MiB");
    assert_eq!(row.matches("1048576").count(), 4, "{row}");
    assert!(out.contains("OK"), "{out}");
}

#[test]
fn three_ranks_and_a_count_that_does_not_divide() {
    let output = program().args(["--ranks", "3", "--count", "1001", "--iters", "1"]).output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    assert!(out.contains("After 4 hops") && out.contains("OK"), "{out}");
}

#[test]
fn bad_input_is_one_line_and_a_code() {
    refused(program().args(["--bytes", "3"]), 2, &["multiple of 4"]);
    refused(program().args(["--bytes", "1X"]), 2, &["K, M or G"]);
    refused(program().args(["--count", "1", "--bytes", "4"]), 2, &["cannot be used with"]);
    refused(program().args(["--iters", "0"]), 2, &["--iters"]);
    refused(program().args(["--ranks", "1000"]), 2, &["1..=256"]);
    refused(program().args(["--ranks", "2", "--count", "9999999999999999"]), 1, &["error:", "a buffer of"]);
}
