//! Runs the program as a user does. Tests that need GPUs report a skip where there are none.

mod gpu;

use std::process::Command;

use program_kit::process::Outcome;
use program_kit::testing::{self, refused, skipped};

fn command(arguments: &[&str]) -> Command {
    let mut command = testing::program_or("DDP_GPU", env!("CARGO_BIN_EXE_ddp-gpu"));
    command.args(arguments);
    command
}

/// The output of the program, which must succeed; where it cannot run, `None` and a line that says so.
fn on_gpus(command: &mut Command) -> Option<String> {
    let Outcome { code, stdout, stderr, .. } = testing::run(command);
    if code == Some(77) {
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        skipped("a test of ddp-gpu with GPUs", &stderr);
        return None;
    }
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    Some(stdout)
}

#[test]
fn without_a_gpu_it_says_what_is_missing_in_one_line() {
    // Hides the GPUs, if there are any.
    for arguments in [&[][..], &["--ranks", "2"], &["--no-overlap"], &["time"], &["time", "--ranks", "2"]] {
        let Outcome { code, stdout, stderr, .. } = testing::run(command(arguments).env("CUDA_VISIBLE_DEVICES", ""));
        assert_eq!((code, stderr.lines().count(), stdout.as_str()), (Some(77), 1, ""), "{stderr}");
        assert!(stderr.starts_with("error: CUDA is not available here: "), "{stderr}");
        assert!(stderr.contains("libcuda.so.1") || stderr.contains("NO_DEVICE"), "{stderr}");
    }
}

#[test]
fn wrong_options_are_usage_errors() {
    for arguments in [
        &["--ranks", "0"][..],
        &["--ranks", "65"],
        &["--rate", "-1"],
        &["--batch", "0"],
        &["time", "--layers", "0"],
        &["time", "--blocks", "129"],
        &["time", "--epochs", "3"],
        &["--epochs", "3", "time"],
        &["draw"],
    ] {
        refused(&mut command(arguments), 2, &[]);
    }
}

#[test]
fn two_ranks_train_and_every_check_holds() {
    let Some(out) = on_gpus(&mut command(&["--ranks", "2", "--epochs", "20"])) else { return };
    assert!(out.contains("OK: world of size 2, 20 epochs, all checks hold"), "{out}");
    assert_eq!(out.lines().filter(|line| line.starts_with("  ok  ")).count(), 7, "{out}");
    assert!(out.contains("2 different starts on 2 rank(s), the same weights after the broadcast"), "{out}");
    assert!(out.contains("bucket 1:       768 bytes"), "{out}");
}

/// The lines of the epochs, with losses and fingerprints of the weights.
fn epochs(out: &str) -> Vec<&str> {
    out.lines().filter(|line| line.ends_with("identical")).collect()
}

#[test]
fn the_proofs_are_the_same_over_nccl() {
    if tinynccl::cuda::device_count().is_ok_and(|gpus| gpus == 1) {
        skipped("the proofs over NCCL", "it needs a GPU for each of two ranks");
        return;
    }
    let arguments = ["--ranks", "2", "--epochs", "20", "--backend"];
    let Some(theirs) = on_gpus(command(&arguments).arg("nccl")) else { return };
    assert!(theirs.contains("backend nccl: ") && theirs.contains("20 epochs, all checks hold"), "{theirs}");
    assert_eq!(theirs.lines().filter(|line| line.starts_with("  ok  ")).count(), 7, "{theirs}");
    let ours = on_gpus(command(&arguments).arg("tinynccl")).unwrap();
    // Two ranks: the average of two numbers has one rounding.
    assert_eq!(epochs(&theirs), epochs(&ours), "{theirs}{ours}");
    assert!(!epochs(&ours).is_empty());
}

#[test]
fn one_rank_trains_too() {
    let Some(out) = on_gpus(&mut command(&["--ranks", "1", "--epochs", "5", "--no-overlap"])) else { return };
    assert!(out.contains("nothing to average") && out.contains("OK: world of size 1"), "{out}");
}

#[test]
fn times_with_and_without_overlap() {
    let arguments = ["time", "--ranks", "2", "--hidden", "512", "--steps", "5", "--rounds", "2"];
    let Some(out) = on_gpus(&mut command(&arguments)) else { return };
    for words in ["no all-reduces", "all-reduces behind backward", "overlapped with backward", "% hidden"] {
        assert!(out.contains(words), "no {words:?}: {out}");
    }
    // The library's choice for a bucket of 11 MB, in two rows and two timelines; ranks that share a GPU have no choice.
    let expected = if out.contains("path: kernels over the peers' memory") { 4 } else { 0 };
    assert_eq!(out.matches("backward, 128 blocks each").count(), expected, "{out}");
    assert!(out.contains("  ok  after 15 steps the same bits with and without overlap"), "{out}");
}

#[test]
fn what_cannot_be_trained_is_refused_before_ranks_start() {
    if on_gpus(&mut command(&["--ranks", "1", "--epochs", "1"])).is_none() {
        return;
    }
    let mut too_much = command(&["--ranks", "1", "--batch", "1000"]);
    let errors = refused(&mut too_much, 2, &["larger than the data (384 points)"]);
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

/// Three processes share one GPU, or two.
#[test]
fn ranks_that_share_gpus_train_too() {
    for (path, words) in [("auto", "kernels in turns over shared GPUs"), ("hosted", "through the hosts' memory")] {
        let mut command = command(&["--ranks", "3", "--epochs", "3", "--no-overlap"]);
        let Some(out) = on_gpus(command.env("TINYNCCL_CUDA_PATH", path)) else { return };
        assert!(out.contains("OK: world of size 3, 3 epochs"), "{out}");
        // With three GPUs or more, ranks do not share one.
        assert!(out.contains(&format!("path: {words}")) || !out.contains("sharing"), "{out}");
    }
}
