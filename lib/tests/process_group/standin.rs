//! Groups on GPUs without a GPU: this test program runs its own tests again, over a stand-in for CUDA's driver
//! (`tools/cuda-standin`), and for the backend NCCL over this project's own `libnccl.so.2` (`bindings/nccl`).

use std::path::Path;
use std::process::Command;

use super::skip;

fn again(tests: &[&str], folders: &[&Path]) {
    let output = Command::new(std::env::current_exe().unwrap())
        .arg("--exact")
        .args(tests)
        .env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !err.contains("SKIPPED"), "{tests:?} over the stand-in:\n{out}\n{err}");
    assert!(out.contains(&format!("{} passed", tests.len())), "{tests:?}:\n{out}");
}

#[test]
fn tinynccl_over_the_stand_in() {
    again(
        &["tinynccl_on_gpus", "survive::a_group_goes_on_without_a_killed_rank"],
        &[&cuda_standin::folder().expect("the stand-in was built")],
    );
}

#[test]
fn our_nccl_over_the_stand_in() {
    let standin = cuda_standin::folder().expect("the stand-in was built");
    // Cargo builds it for the tests of the whole workspace, or for its own.
    let library = std::env::current_exe().unwrap().with_file_name("libnccl.so");
    if !library.is_file() {
        return skip(
            "the backend NCCL over our library",
            &"there is no libnccl.so: cargo build -p tinynccl-nccl --tests",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&library, folder.path().join("libnccl.so.2")).unwrap();
    again(&["nccl_on_gpus", "nccl_as_processes"], &[&standin, folder.path()]);
}
