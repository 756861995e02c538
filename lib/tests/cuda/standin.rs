//! Device communicators without a GPU: this test binary runs its own tests again with a stand-in for CUDA's driver in
//! front (`tools/cuda-standin`), on two devices that do not reach each other. So all of them take the hosted path.

use std::process::Command;

/// Runs the tests that begin with `which` over the stand-in, except `not`.
fn over_the_stand_in(which: &[&str], not: &[&str], settings: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(which)
        .args(not.iter().flat_map(|name| ["--skip", name]))
        .env("LD_LIBRARY_PATH", cuda_standin::folder().expect("the stand-in was built"))
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{which:?} over the stand-in, {settings:?}:\n{out}\n{err}");
    assert!(!err.contains("SKIPPED"), "{err}");
    assert!(out.contains("test result: ok. ") && !out.contains(" 0 passed"), "{out}");
    print!("{out}");
}

const HOSTED: (&str, &str) = ("TINYNCCL_CUDA_PATH", "hosted");

#[test]
fn the_hosted_path() {
    over_the_stand_in(&["hosted::"], &[], &[]);
}

#[test]
fn collectives() {
    over_the_stand_in(&["peers::"], &[], &[HOSTED]);
}

#[test]
fn faults() {
    over_the_stand_in(&["faults::"], &[], &[HOSTED]);
}
