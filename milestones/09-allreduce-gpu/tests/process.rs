//! The program as its user starts it. With a GPU it must work; without one it must say so.

use assert_cmd::Command;

/// The program: beside the tests, or where a machine without Cargo has it.
fn program() -> Command {
    match std::env::var_os("ALLREDUCE_GPU") {
        Some(path) => Command::new(path),
        None => assert_cmd::cargo::cargo_bin_cmd!("allreduce-gpu"),
    }
}

/// GPUs that the driver sees.
fn gpus() -> usize {
    tinynccl::cuda::device_count().unwrap_or(0)
}

fn run(arguments: &[&str]) -> Option<String> {
    let output = program().args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if gpus() == 0 {
        assert_eq!(output.status.code(), Some(77), "{out}{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
        assert!(err.starts_with("error: CUDA is not available here: "), "{err}");
        eprintln!("SKIPPED {arguments:?}: no GPU (the program says: {})", err.trim_end());
        return None;
    }
    assert!(output.status.success(), "{out}{err}");
    Some(out.into_owned())
}

#[test]
fn a_rank_for_each_gpu() {
    let Some(out) = run(&["--bytes", "8,1K,1M,8M", "--iters", "5"]) else { return };
    assert!(out.contains("Every element was checked on every rank: OK."), "{out}");
    for size in ["| 8 |", "| 1024 |", "| 1048576 |", "| 8388608 |"] {
        assert!(out.contains(size), "{out}");
    }
}

#[test]
fn more_ranks_than_gpus_take_turns() {
    let ranks = (gpus() + 1).min(8).to_string();
    let Some(out) = run(&["--ranks", &ranks, "--bytes", "8,40K,8M,96M", "--iters", "3"]) else { return };
    assert!(out.contains("path: kernels in turns over shared GPUs") && out.contains("| phases |"), "{out}");
    assert!(out.contains("Every element was checked on every rank: OK."), "{out}");
}

#[test]
fn a_size_that_is_no_number_of_elements_is_refused() {
    let output = program().args(["--bytes", "6"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("expected a multiple of 4"));
}
