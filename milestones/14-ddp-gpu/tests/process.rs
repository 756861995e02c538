//! The program as a user runs it. What needs GPUs is skipped, and says so, where there are none.

mod gpu;

use std::io::{self, Write};
use std::process::Output;
use std::time::Duration;

/// Beside this test on a machine that has no cargo (scripts/gpu-tests.sh), else where cargo built it; outside any launcher's
/// environment.
fn command(arguments: &[&str]) -> assert_cmd::Command {
    let program = std::env::var_os("DDP_GPU").unwrap_or_else(|| env!("CARGO_BIN_EXE_ddp-gpu").into());
    let mut command = assert_cmd::Command::new(program);
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TINYNCCL_UNIQUE_ID"]
    {
        command.env_remove(name);
    }
    command.args(arguments).timeout(Duration::from_secs(120));
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What it did; `None`, said aloud, where it cannot run.
fn on_gpus(arguments: &[&str]) -> Option<Output> {
    let output = command(arguments).output().unwrap();
    let errors = text(&output.stderr);
    let unavailable = output.status.code() == Some(77);
    if unavailable {
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
    if unavailable {
        // Not by a macro: the test harness would keep it to itself.
        let _ = writeln!(io::stderr(), "SKIPPED: a test of ddp-gpu with GPUs: {}", errors.trim());
        return None;
    }
    Some(output)
}

#[test]
fn without_a_gpu_it_says_what_is_missing_in_one_line() {
    // Where there is a GPU it is hidden; where there is no driver, hiding does nothing.
    for arguments in [&[][..], &["--ranks", "2"], &["--no-overlap"], &["time"], &["time", "--ranks", "2"]] {
        let output = command(arguments).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(77), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.starts_with("error: CUDA is not available here: "), "{errors}");
        assert!(errors.contains("libcuda.so.1") || errors.contains("NO_DEVICE"), "{errors}");
        assert!(output.stdout.is_empty());
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
        let output = command(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn two_ranks_train_and_every_check_holds() {
    let Some(output) = on_gpus(&["--ranks", "2", "--epochs", "20"]) else { return };
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    assert!(out.contains("OK: world of size 2, 20 epochs, all checks hold"), "{out}");
    assert_eq!(out.lines().filter(|line| line.starts_with("  ok  ")).count(), 7, "{out}");
    assert!(out.contains("2 different starts on 2 rank(s), the same weights after the broadcast"), "{out}");
    assert!(out.contains("bucket 1:       768 bytes"), "{out}");
}

/// The lines of the epochs: losses and fingerprints of the weights.
fn epochs(output: &Output) -> Vec<String> {
    text(&output.stdout).lines().filter(|line| line.ends_with("identical")).map(str::to_owned).collect()
}

#[test]
fn the_proofs_are_the_same_over_nccl() {
    if tinynccl::cuda::device_count().is_ok_and(|gpus| gpus == 1) {
        let _ = writeln!(io::stderr(), "SKIPPED the_proofs_are_the_same_over_nccl: NCCL needs two GPUs for two ranks");
        return;
    }
    let arguments = ["--ranks", "2", "--epochs", "20", "--backend"];
    let Some(theirs) = on_gpus(&[&arguments[..], &["nccl"]].concat()) else { return };
    let out = text(&theirs.stdout);
    assert!(theirs.status.success(), "{out}{}", text(&theirs.stderr));
    assert!(out.contains("backend nccl: ") && out.contains("20 epochs, all checks hold"), "{out}");
    assert_eq!(out.lines().filter(|line| line.starts_with("  ok  ")).count(), 7, "{out}");
    let ours = on_gpus(&[&arguments[..], &["tinynccl"]].concat()).unwrap();
    // Two ranks: the average of two numbers has one rounding.
    assert_eq!(epochs(&theirs), epochs(&ours), "{out}{}", text(&ours.stdout));
    assert!(!epochs(&ours).is_empty());
}

#[test]
fn one_rank_trains_too() {
    let Some(output) = on_gpus(&["--ranks", "1", "--epochs", "5", "--no-overlap"]) else { return };
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    assert!(out.contains("nothing to average") && out.contains("OK: world of size 1"), "{out}");
}

#[test]
fn times_with_and_without_overlap() {
    let Some(output) = on_gpus(&["time", "--ranks", "2", "--hidden", "512", "--steps", "5", "--rounds", "2"]) else {
        return;
    };
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    for words in ["no all-reduces", "all-reduces behind backward", "overlapped with backward", "% hidden"] {
        assert!(out.contains(words), "no {words:?}: {out}");
    }
    // What the library chooses for a bucket of 11 MB, whatever was tried; where ranks share a GPU there is no such choice.
    let expected = if out.contains("path: kernels over the peers' memory") { 4 } else { 0 };
    assert_eq!(out.matches("backward, 128 blocks each").count(), expected, "{out}");
    assert!(out.contains("  ok  after 15 steps the same bits with and without overlap"), "{out}");
}

#[test]
fn what_cannot_be_trained_is_refused_before_ranks_start() {
    if on_gpus(&["--ranks", "1", "--epochs", "1"]).is_none() {
        return;
    }
    let output = command(&["--ranks", "1", "--batch", "1000"]).output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!((output.status.code(), errors.lines().count()), (Some(1), 1), "{errors}");
    assert!(errors.contains("larger than the data (384 points)"), "{errors}");
}

/// Three processes share one GPU, or two.
#[test]
fn ranks_that_share_gpus_train_too() {
    for (path, words) in [("auto", "kernels in turns over shared GPUs"), ("hosted", "through the hosts' memory")] {
        let mut command = command(&["--ranks", "3", "--epochs", "3", "--no-overlap"]);
        let output = command.env("TINYNCCL_CUDA_PATH", path).output().unwrap();
        let (out, errors) = (text(&output.stdout), text(&output.stderr));
        if output.status.code() == Some(77) {
            let _ = writeln!(io::stderr(), "SKIPPED: a test of ddp-gpu with GPUs: {}", errors.trim());
            return;
        }
        assert!(output.status.success(), "{out}{errors}");
        assert!(out.contains("OK: world of size 3, 3 epochs"), "{out}");
        // With three GPUs or more nobody shares one.
        assert!(out.contains(&format!("path: {words}")) || !out.contains("sharing"), "{out}");
    }
}
