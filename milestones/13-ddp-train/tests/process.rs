//! Runs the real program: it starts its own ranks.

use std::time::Duration;

use assert_cmd::Command;

/// The program, outside any launcher's environment.
fn program() -> Command {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("ddp-train");
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
fn two_ranks_train_and_agree() {
    let output = program().args(["--ranks", "2", "--epochs", "30"]).output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    assert!(out.contains("OK: 31 comparisons, the same bits on 2 ranks each time"), "{out}");
    let last = out.lines().rfind(|l| l.contains("identical")).unwrap();
    let loss: f64 = last.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(loss < 0.3, "{last}");
}

#[test]
fn each_part_left_out_makes_the_proof_fail() {
    let broken = |what| {
        let mut command = program();
        command.args(["--ranks", "2", "--epochs", "2", "--break", what]);
        command
    };
    refused(&mut broken("broadcast"), 1, &["before the first step", "--break broadcast", "layer0.weight"]);
    refused(&mut broken("average"), 1, &["after epoch 1", "--break average", "rank 1"]);
}

#[test]
fn bad_input_is_one_line_and_a_code() {
    refused(program().args(["--ranks", "0"]), 2, &["1..=256"]);
    refused(program().args(["--rate", "-1"]), 2, &["expected a positive number"]);
    refused(program().args(["--break", "everything"]), 2, &["broadcast, average"]);
    refused(program().args(["--ranks", "3", "--batch", "32"]), 1, &["error: a global batch of 32", "multiple of 3"]);
    refused(program().args(["--batch", "1000"]), 1, &["larger than the data (384 points)"]);
    refused(program().env("TINYNCCL_TRANSPORT", "rdma"), 1, &["error: TINYNCCL_TRANSPORT"]);
}

#[test]
fn a_loss_that_explodes_is_an_error() {
    refused(program().args(["--ranks", "2", "--rate", "3e38"]), 1, &["the loss is", "smaller --rate"]);
}
