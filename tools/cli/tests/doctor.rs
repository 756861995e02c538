//! Runs `doctor` on this machine, whatever it has.

use program_kit::testing;
use serde_json::Value;

fn doctor(arguments: &[&str]) -> String {
    testing::output(testing::program(env!("CARGO_BIN_EXE_tinynccl-cli")).arg("doctor").args(arguments))
}

#[test]
fn all_sixteen_milestones_are_judged() {
    let page: Value = serde_json::from_str(&doctor(&["--json"])).unwrap();
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
    let text = doctor(&[]);
    for words in
        ["Host\n", "/dev/shm", "Network interfaces", "RDMA devices", "NCCL", "Python", "Milestones", "16 ddp-gpt"]
    {
        assert!(text.contains(words), "{words} in\n{text}");
    }
}
