//! The program as a user runs it. Without a GPU, the tests that need one report that they are skipped.

use std::io::{self, Write};
use std::time::Duration;

use assert_cmd::assert::Assert;

/// The program: beside this test on a machine without cargo (scripts/gpu-tests.sh), else where cargo built it.
fn command(arguments: &[&str]) -> assert_cmd::Command {
    let program = std::env::var_os("CUDA_VEC_ADD").unwrap_or_else(|| env!("CARGO_BIN_EXE_cuda-vec-add").into());
    let mut command = assert_cmd::Command::new(program);
    command.args(arguments).timeout(Duration::from_secs(120));
    command
}

fn vec_add(arguments: &[&str]) -> Assert {
    command(arguments).assert()
}

/// The error output when the driver shows no GPU.
fn vec_add_without_gpu(arguments: &[&str]) -> String {
    let assert = command(arguments).env("CUDA_VISIBLE_DEVICES", "").assert().code(77);
    String::from_utf8(assert.get_output().stderr.clone()).expect("text")
}

/// The program's output; `None`, with a note on standard error, if it cannot run.
fn on_a_gpu(arguments: &[&str]) -> Option<String> {
    let assert = vec_add(arguments);
    let output = assert.get_output();
    if output.status.code() == Some(77) {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("libcuda.so.1") || text.contains("GPU") || text.contains("libnvrtc"), "{text}");
        // Not through a macro, whose output the test harness would capture.
        let _ = writeln!(io::stderr(), "SKIPPED: a test of cuda-vec-add: {}", text.trim());
        return None;
    }
    Some(String::from_utf8(assert.success().get_output().stdout.clone()).expect("text"))
}

#[test]
fn wrong_options_are_usage_errors() {
    for arguments in [&["-n", "0"][..], &["-n", "many"], &["--block", "0"], &["--block", "1025"], &["fault", "other"]] {
        vec_add(arguments).code(2);
    }
}

#[test]
fn without_a_gpu_it_says_what_is_missing_in_one_line() {
    // If there is a GPU, this hides it; without a driver, hiding has no effect.
    for arguments in [&[][..], &["faults"], &["fault", "launch"]] {
        let text = vec_add_without_gpu(arguments);
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("libcuda.so.1") || text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
    }
}

#[test]
fn every_kernel_is_right_at_lengths_that_fill_no_block() {
    let Some(text) = on_a_gpu(&["-n", "1,2,3,5,31,255,257,1023,65537,1000003", "--repetitions", "1"]) else { return };
    assert!(text.contains("all equal"), "{text}");
    let rows = text.lines().filter(|l| l.matches('%').count() == 4).count();
    assert_eq!(rows, 10, "{text}");
}

#[test]
fn blocks_of_any_size() {
    for block in ["1", "33", "1024"] {
        let Some(text) = on_a_gpu(&["-n", "4097", "--block", block, "--repetitions", "1"]) else { return };
        assert!(text.contains("all equal"), "{text}");
    }
}

#[test]
fn each_mistake_is_named() {
    let Some(text) = on_a_gpu(&["faults"]) else { return };
    for word in [
        "identifier \"d\" is undefined",
        "CUDA_ERROR_INVALID_VALUE (1)",
        "CUDA_ERROR_ILLEGAL_ADDRESS (700)",
        "CUDA_ERROR_MISALIGNED_ADDRESS (716)",
    ] {
        assert!(text.contains(word), "no {word}: {text}");
    }
    // A refused launch leaves the context usable; a kernel that faults does not.
    let next: Vec<bool> = text.lines().filter(|l| l.contains("the next call:")).map(|l| l.ends_with("fine")).collect();
    assert_eq!(next, [true, false, false], "{text}");
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_tried() {
    if on_a_gpu(&["-n", "1"]).is_none() {
        return;
    }
    let text = String::from_utf8(vec_add(&["-n", "16G"]).code(1).get_output().stderr.clone()).expect("text");
    assert!(text.contains("ask for fewer elements"), "{text}");
}
