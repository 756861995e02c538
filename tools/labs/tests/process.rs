//! Runs the labs: each failure appears with the output of its page, and the fixed version does not have it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use program_kit::testing::{self, output, refused};

fn labs() -> Command {
    testing::program(env!("CARGO_BIN_EXE_labs"))
}

/// Compares all outputs of a lab with those of the book.
fn as_in_the_book(lab: &str) {
    check(&mut labs(), lab);
}

/// Runs `check`, which is `labs` with its environment, to compare a lab's output with the book; returns what it prints.
fn check(check: &mut Command, lab: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/labs/outputs");
    check.args(["outputs", "--check"]).arg(folder).arg(lab);
    let outcome = testing::run_for(check, Duration::from_secs(200));
    let (success, text) = (outcome.success(), outcome.stdout + &outcome.stderr);
    for line in text.lines().filter_map(|line| line.strip_prefix("SKIPPED")) {
        testing::skipped("a lab", line.trim_start_matches(": "));
    }
    assert!(
        !(lab == "stale-registration" && text.contains("SKIPPED") && std::env::var_os("TINYNCCL_TEST_VERBS").is_some()),
        "TINYNCCL_TEST_VERBS is set, but {text}"
    );
    assert!(success, "{text}");
    text
}

macro_rules! labs {
    ($($test:ident: $lab:literal;)*) => {
        $(#[test] fn $test() { as_in_the_book($lab); })*

        #[test]
        fn every_lab_is_tested() {
            let list = output(labs().arg("list"));
            let rows = list.lines().take_while(|line| !line.is_empty());
            let names: Vec<&str> = rows.filter_map(|line| line.split_whitespace().next()).collect();
            let mut tested = vec![$($lab),*];
            tested.sort_unstable();
            let mut sorted = names.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, tested);
        }
    };
}

labs! {
    mismatched_counts: "mismatched-counts";
    order: "order";
    dead_rank: "dead-rank";
    stopped_rank: "stopped-rank";
    missing_group: "missing-group";
    shm_full: "shm-full";
    wrong_interface: "wrong-interface";
    slow_link: "slow-link";
    sum_order: "sum-order";
    rdma_stale_registration: "stale-registration";
    rdma_wrong_gid: "wrong-gid";
    rdma_rnr_storm: "rnr-storm";
    wrong_icrc: "wrong-icrc";
    lossy_link: "lossy-link";
    gpu_counts: "gpu-counts";
    gpu_stream: "gpu-stream";
    gpu_full: "gpu-full";
    flapping_rail: "flapping-rail";
    slow_gpu: "slow-gpu";
    missing_group_start: "missing-group-start";
    gpu_dead_rank: "gpu-dead-rank";
    gpu_wrong_interface: "gpu-wrong-interface";
    kill_any_rank: "kill-any-rank";
}

/// Labs without their own kernels, over this library: on any machine, with a stand-in for CUDA's driver.
#[test]
fn labs_on_gpus_that_need_no_kernel() {
    for lab in ["missing-group-start", "gpu-dead-rank", "gpu-wrong-interface"] {
        let mut labs = labs();
        labs.env("LD_LIBRARY_PATH", cuda_standin::folder().unwrap()).env_remove("CUDA_VISIBLE_DEVICES");
        // NVIDIA's NCCL needs another driver.
        labs.env("TINYNCCL_NCCL_LIB", "/nowhere");
        let text = check(&mut labs, lab);
        for case in ["", "-fixed"] {
            assert!(text.contains(&format!("{lab}{case}: as in the book")), "{text}");
        }
        assert!(text.contains(&format!("SKIPPED: {lab}-nccl: error: this lab cannot run here: ")), "{text}");
    }
}

/// Also when every process is killed but one, which computes the sums of four ranks in another order.
#[test]
fn deaths_do_not_change_the_loss() {
    let run = |arguments: &[&str], code: i32| {
        let folder = tempfile::tempdir().unwrap();
        let mut run = labs();
        run.arg("kill-any-rank").args(arguments).current_dir(&folder);
        let outcome = testing::run_for(&mut run, Duration::from_secs(200));
        assert_eq!(outcome.code, Some(code), "{}{}", outcome.stdout, outcome.stderr);
        let curve = std::fs::read_to_string(folder.path().join("out/kill-any-rank/loss.svg")).unwrap();
        let last = outcome.stdout.lines().rev().find_map(|line| line.split_once("  validation loss "));
        let last: f64 = last.unwrap().1.parse().unwrap();
        (outcome.stdout, last, curve.contains("the group changed"))
    };
    let (_, calm, marked) = run(&["--fixed"], 0);
    assert!(!marked);
    let (text, last, marked) = run(&["--kill=4@1,5@1,0@10,1@20,2@30"], 3);
    assert!(text.contains(" on all 1 ranks") && marked, "{text}");
    approx::assert_abs_diff_eq!(calm, last, epsilon = 1e-3);
}

/// In a ring with a slow link all ranks are equally slow; the time that messages are under way shows which link it is.
#[test]
fn the_trace_names_the_slow_link() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("slow.json");
    refused(labs().arg("slow-link").env("TINYNCCL_TRACE", &trace), 3, &[]);
    let text = output(labs().arg("waits").arg(&trace));
    let times = text.lines().filter_map(|line| {
        let (link, rest) = line.split_once("      ").filter(|(link, _)| link.contains("->"))?;
        Some((link.trim().to_owned(), rest.split_whitespace().last()?.parse::<f64>().ok()?))
    });
    let slowest = times.max_by(|a, b| a.1.total_cmp(&b.1)).expect("a table");
    assert_eq!(slowest.0, "2 -> 3", "{text}");
}

/// The commands that a run names at its end can be typed as they stand.
#[test]
fn the_trace_that_a_run_names_can_be_read() {
    for lab in ["dead-rank", "stopped-rank", "missing-group", "wrong-icrc"] {
        let folder = tempfile::tempdir().unwrap();
        let mut run = labs();
        run.arg(lab).current_dir(&folder);
        run.env("TINYNCCL_TRACE", format!("{lab}.json")).env("TINYROCE_TRACE", format!("{lab}.pcap"));
        let outcome = testing::run_for(&mut run, Duration::from_secs(100));
        assert_eq!(outcome.code, Some(3), "{lab}: {}", outcome.stderr);
        let mut lines = outcome.stdout.lines().skip_while(|line| !line.starts_with("The trace:"));
        let reader = lines.nth(1).and_then(|line| line.trim().strip_prefix("cargo run -p labs -- "));
        let reader = reader.unwrap_or_else(|| panic!("{lab} names no trace: {}", outcome.stdout));
        let text = output(labs().args(reader.split(' ')).current_dir(&folder));
        assert!(text.contains("wait for") || text.contains("psn"), "{lab}: {text}");
    }
}

/// A request of each kind, of which a packet is lost: the chapter "Inside the card" shows these.
#[test]
fn a_wire_shows_how_the_card_recovers() {
    let scenes: [(&str, &[&str]); 6] = [
        ("send", &["psn 100  SEND first", "psn 102  ACK                  msn 1", "B: 1 completion: Recv, 3000 B"]),
        ("rnr", &["psn 100  RNR NAK              msn 0  wait 40.96 ms", "B: 1 completion: Recv, 3000 B"]),
        (
            "lost-request",
            &[
                "psn 101  SEND mid             1024 B   LOST",
                "psn 101  NAK sequence error",
                "B: 1 completion: Recv, 6000 B",
            ],
        ),
        ("lost-ack", &["psn 100  ACK                  msn 1   LOST", "B: 1 completion: Recv, 500 B"]),
        (
            "lost-response",
            &[
                "psn 102  READ response mid    1024 B   LOST",
                "psn 102  READ request         asks for 2952 B",
                "A: completion: Read, Success",
            ],
        ),
        ("lost-atomic", &["it was 0   LOST", "B: the word is 1, and the program was not notified"]),
    ];
    for (scene, words) in scenes {
        let outcome = testing::run_for(labs().args(["wire", scene]), Duration::from_secs(100));
        if outcome.code == Some(77) {
            return testing::skipped("the card's scenes", outcome.stderr.trim());
        }
        let text = outcome.stdout;
        assert!(words.iter().all(|words| text.contains(words)), "{scene}: {text}{}", outcome.stderr);
        let sent_again = text.matches("SEND only").count();
        assert!(scene != "lost-ack" || sent_again >= 2, "{text}");
    }
}

#[test]
fn a_run_ends_with_what_comes_next() {
    let outcome = testing::run(labs().arg("dead-rank"));
    assert_eq!(outcome.code, Some(3), "{}", outcome.stderr);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(lines[0].starts_with("Lab 03 A dead rank. What you see: "), "{}", outcome.stdout);
    assert_eq!(lines.last(), Some(&"Mended:     cargo run -p labs -- dead-rank --fixed"), "{}", outcome.stdout);
    assert_eq!(outcome.stdout.matches("Lab 03").count(), 1, "ranks do not repeat it: {}", outcome.stdout);
}

#[test]
fn wrong_usage_is_one_line_and_a_code() {
    for (arguments, code, words) in [
        (&["pigeon"][..], 2, "pigeon"),
        (&["outputs", "/nowhere", "pigeon"], 2, "there is no lab \"pigeon\""),
        (&["waits", "/nowhere"], 1, "reading /nowhere"),
        (&["packets", "/nowhere"], 1, "reading /nowhere"),
        (&["packets", "Cargo.toml"], 1, "Cargo.toml is no trace of a card"),
        (&["wire", "sunshine"], 2, "sunshine"),
        (&["dead-rank", "--broken"], 2, "--broken"),
        (&["gpu-dead-rank", "--backend=gloo"], 2, "gloo"),
        (&["missing-group-start", "--bytes=many"], 2, "many"),
        (&["kill-any-rank", "--kill=6@1"], 2, "expected a rank below 6"),
        (&["kill-any-rank", "--kill=1@1,1@2"], 2, "--kill names rank 1 twice"),
    ] {
        refused(labs().args(arguments), code, &[words]);
    }
    // Not this machine's lack of GPUs.
    for lab in ["gpu-counts", "gpu-dead-rank", "dead-rank"] {
        refused(labs().arg(lab).env("TINYNCCL_TIMEOUT", "soon"), 1, &["TINYNCCL_TIMEOUT=\"soon\""]);
    }
}
