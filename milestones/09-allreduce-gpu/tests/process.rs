//! Runs the program as a user does. With a GPU it must work; without one it must say so.

use std::process::Command;

use program_kit::testing::{self, output, refused, skipped};

fn program() -> Command {
    testing::program_or("ALLREDUCE_GPU", env!("CARGO_BIN_EXE_allreduce-gpu"))
}

/// The number of GPUs that the driver sees.
fn gpus() -> usize {
    tinynccl::cuda::device_count().unwrap_or(0)
}

fn run(arguments: &[&str]) -> Option<String> {
    if gpus() == 0 {
        let errors = refused(program().args(arguments), 77, &[]);
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.starts_with("error: CUDA is not available here: "), "{errors}");
        skipped("all-reduce between GPUs", &errors);
        return None;
    }
    Some(output(program().args(arguments)))
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
fn a_kernel_of_our_own_sums_as_the_librarys_do() {
    // Two ranks on one GPU would share it in time slices, and a kernel that waits would wait for its own slice to end.
    if gpus() == 1 {
        return skipped("the kernel of one_shot.cu", "it needs two GPUs, and the driver sees 1");
    }
    let Some(out) = run(&["--own-kernel", "--bytes", "4,8,12,1K,100004,256K,1M", "--iters", "50"]) else { return };
    assert!(out.contains("Every element of it was checked on every rank: OK."), "{out}");
    let rows = out.split("one_shot.cu").last().expect("a table");
    for size in ["| 4 |", "| 12 |", "| 100004 |", "| 262144 |"] {
        assert!(rows.contains(size), "{out}");
    }
    assert!(!rows.contains("| 1048576 |"), "{out}");
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
    refused(program().args(["--bytes", "6"]), 2, &["expected a multiple of 4"]);
}
