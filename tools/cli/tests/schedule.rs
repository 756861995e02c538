//! The command `schedule`, as a process.

use program_kit::testing;

#[test]
fn numbers_of_ranks_that_no_schedule_has() {
    let refused = |ranks: &str, code, words: &[&str]| {
        let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
        testing::refused(command.args(["schedule", "all-reduce", "ring", "--ranks", ranks]), code, words);
    };
    refused("0", 2, &["0 is not in 1..="]);
    refused("100000", 2, &["2200.0 GB in all", "tinynccl-cli simulate all-reduce --algo ring --ranks 100000"]);
}

const OWN: &str = "
    # Rank 1 adds and sends the sum back.
    schedule: all-reduce, 2 ranks, 1 parts
    rank 0 ch 0: send in[0.0] -> 1
    rank 0 ch 0: recv 1 -> out[0.0]
    rank 1 ch 0: recv 0, reduce in[0.0] -> out[0.0] (last), send -> 0
";

#[test]
fn a_schedule_of_ones_own_is_proved_drawn_and_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.txt");
    let own = |words: &[&str]| {
        let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
        command.args(words).arg("--program").arg(&file);
        command
    };
    std::fs::write(&file, OWN).unwrap();
    let text = testing::output(&mut own(&["schedule"]));
    assert!(text.starts_with("rank 0 ch 0: send in[0.0] → 1\n") && text.lines().count() == 3, "{text}");
    let page = testing::output(&mut own(&["schedule", "--format", "html"]));
    assert!(page.contains("<h1>all_reduce, program ") && page.contains("class=\"arriving\""), "{page}");
    let time = testing::output(&mut own(&["simulate", "--topology", "switch", "--size", "1M"]));
    // Twice 1 us and 1 MiB at 10 GB/s.
    assert!(time.contains("all_reduce, program ") && time.contains("time    211.72 us"), "{time}");
    std::fs::write(&file, OWN.replace(" (last)", "")).unwrap();
    testing::refused(
        &mut own(&["schedule"]),
        1,
        &["own.txt: schedule: ", "expected the finished reduction over 2 ranks"],
    );
    testing::refused(own(&["simulate"]).args(["--ranks", "3"]), 2, &["cannot be used with"]);
    let mut nothing = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    testing::refused(nothing.arg("schedule"), 2, &["required"]);
}
