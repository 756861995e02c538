//! Runs the program, which starts its own ranks.

use std::process::Command;

use program_kit::testing::{self, output, refused};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_ddp-train"))
}

#[test]
fn two_ranks_train_and_agree() {
    let out = output(program().args(["--ranks", "2", "--epochs", "30"]));
    assert!(out.contains("OK: world of size 2, 31 comparisons, the same bits each time"), "{out}");
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
    refused(program().args(["--plot", "/nowhere/train.svg"]), 2, &["--plot /nowhere/train.svg", "no folder /nowhere"]);
    refused(program().args(["--break", "everything"]), 2, &["broadcast, average"]);
    refused(program().args(["--ranks", "3", "--batch", "32"]), 2, &["error: a global batch of 32", "multiple of 3"]);
    refused(program().args(["--batch", "1000"]), 2, &["larger than the data (384 points)"]);
    refused(program().env("TINYNCCL_TRANSPORT", "rdma"), 1, &["error: TINYNCCL_TRANSPORT"]);
}

#[test]
fn a_loss_that_explodes_is_an_error() {
    refused(program().args(["--ranks", "2", "--rate", "3e38"]), 1, &["the loss is", "smaller --rate"]);
}
