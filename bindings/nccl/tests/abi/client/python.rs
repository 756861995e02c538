//! The client that wraps the library by ctypes, as inference servers do: scripts/nccl/vllm_like.py, two ranks.

use std::path::Path;
use std::process::{Command, Stdio};

use super::apart::{folders, wait};

#[test]
fn a_wrapper_by_ctypes_makes_every_call() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("SKIPPED a_wrapper_by_ctypes_makes_every_call: there is no python3");
        return;
    }
    let started = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/nccl/vllm_like.py"))
        .args(["--limit", "60"])
        .env("LD_LIBRARY_PATH", folders())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("TINYNCCL_STANDIN_DEVICES", "2")
        .env("TINYNCCL_CUDA_BLOCKS", "2")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("VLLM_NCCL_SO_PATH")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let output = wait(started.unwrap());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.ends_with("9 checks, 0 failed\n"), "{}\n{out}\n{err}", output.status);
}
