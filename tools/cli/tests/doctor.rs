//! Runs `doctor` on this machine, whatever it has.

use std::process::Output;

use serde_json::Value;

fn doctor(arguments: &[&str]) -> Output {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("tinynccl-cli");
    command.arg("doctor").args(arguments).timeout(std::time::Duration::from_secs(100)).output().unwrap()
}

#[test]
fn all_sixteen_milestones_are_judged() {
    let output = doctor(&["--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page: Value = serde_json::from_slice(&output.stdout).unwrap();
    let milestones = page["milestones"].as_array().unwrap();
    assert_eq!(milestones.len(), 16);
    for milestone in milestones {
        let verdict = milestone["verdict"].as_str().unwrap();
        assert!(["runs", "fallback", "cannot"].contains(&verdict), "{milestone}");
        assert!(verdict != "cannot" || milestone["mend"].is_string(), "{milestone}");
    }
    // The tests of the library ran here, so its ranks can.
    assert_eq!(milestones[6]["verdict"], "runs");
    assert!(page["host"]["cores"]["usable"].as_u64().unwrap() > 0);
    assert!(page["interfaces"].as_array().unwrap().iter().any(|i| i["loopback"] == true), "{page}");
}

#[test]
fn the_report_is_for_people() {
    let output = doctor(&[]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for words in
        ["Host\n", "/dev/shm", "Network interfaces", "RDMA devices", "NCCL", "Python", "Milestones", "16 ddp-gpt"]
    {
        assert!(text.contains(words), "{words} in\n{text}");
    }
}
