//! Device communicators without a GPU: this test binary runs its own tests again with a stand-in for CUDA's driver in
//! front (`tools/cuda-standin`), on two devices that do not reach each other. So all of them take the hosted path.

use std::process::Command;
use std::sync::Mutex;

/// Tests of kernels, of windows and of graphs that kernels are in: the stand-in has none.
const NEED_KERNELS: &[&str] = &[
    "faults::kernels",
    "a_graph_that_is_replayed",
    "a_path_that_spoils_data",
    "exact::a_",
    "exact::every_kernel",
    "a_window_that_does_not_fit",
    "ranks_without_a_path",
    "calls_are_verified_as_a_whole",
];

/// Runs the tests that begin with `which` over the stand-in.
fn over_the_stand_in(which: &str, settings: &[(&str, &str)]) {
    // They start separate processes: one set after the other.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    let output = Command::new(std::env::current_exe().unwrap())
        .arg(which)
        .args(NEED_KERNELS.iter().flat_map(|name| ["--skip", name]))
        .env("LD_LIBRARY_PATH", cuda_standin::folder().expect("the stand-in was built"))
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{which} over the stand-in with {settings:?}:\n{out}\n{err}");
    assert!(!err.contains("SKIPPED"), "{which} over the stand-in:\n{err}");
    assert!(!out.contains("running 0 tests"), "no test begins with {which}");
}

const HOSTED: (&str, &str) = ("TINYNCCL_CUDA_PATH", "hosted");

#[test]
fn the_hosted_path() {
    over_the_stand_in("hosted::", &[]);
}

/// Inside each host through its memory, as there are no kernels.
#[test]
fn several_hosts() {
    over_the_stand_in("hosts::", &[]);
}

#[test]
fn collectives() {
    over_the_stand_in("peers::", &[HOSTED]);
}

#[test]
fn messages() {
    over_the_stand_in("messages::", &[HOSTED]);
}

#[test]
fn collectives_where_peers_are_tried_first() {
    over_the_stand_in("peers::calls_through_two_streams", &[]);
    over_the_stand_in("peers::ranks_that_meet_through_a_host_communicator", &[]);
}

#[test]
fn hangs() {
    over_the_stand_in("hangs::", &[HOSTED]);
}

#[test]
fn faults() {
    over_the_stand_in("faults::", &[HOSTED]);
}
