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

fn cli(words: &[&str]) -> std::process::Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    command.args(words);
    command
}

/// A file of `docs/programs`.
fn example(name: &str) -> String {
    format!("{}/../../docs/programs/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn files_of_other_projects_are_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (xml, json) = (path("ring.xml"), path("ring.json"));
    let ring = ["schedule", "all-reduce", "ring", "--ranks", "4", "--format"];
    let ours = testing::output(cli(&ring).arg("program"));
    testing::output(cli(&ring).args(["msccl", "--output", &xml]));
    testing::output(&mut cli(&["schedule", "--program", &xml, "--format", "mscclpp", "--in-place", "--output", &json]));
    assert!(std::fs::read_to_string(&xml).unwrap().starts_with("<algo name=\"tinynccl_all_reduce_"));
    assert!(std::fs::read_to_string(&json).unwrap().contains("\"inplace\":true"));
    for file in [&xml, &json] {
        let again = testing::output(&mut cli(&["schedule", "--program", file, "--format", "program"]));
        assert!(again.starts_with("schedule: all_reduce, 4 ranks, 4 parts\n"), "{again}");
        assert!(file == &json || again == ours, "{again}");
        let time = testing::output(&mut cli(&["simulate", "--topology", "switch", "--size", "1M", "--program", file]));
        assert!(time.contains("all_reduce, program "), "{time}");
    }
    let scan = ["schedule", "scan", "direct", "--ranks", "3", "--format", "msccl"];
    testing::refused(&mut cli(&scan), 1, &["MSCCL: it has no scan, only all_reduce, all_gather"]);
    let to_all = ["schedule", "all-to-all", "direct", "--ranks", "3", "--format", "mscclpp", "--in-place"];
    testing::refused(&mut cli(&to_all), 1, &["in place the schedule is wrong: all_to_all has no form in place"]);
}

#[test]
fn examples_are_drawn_and_errors_name_the_step() {
    let page =
        testing::output(&mut cli(&["schedule", "--format", "html", "--program", &example("all-reduce-all-pairs.xml")]));
    assert!(page.contains("<h1>all_reduce, program "), "{page}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.xml");
    let text = std::fs::read_to_string(example("all-reduce-all-pairs.xml")).unwrap();
    std::fs::write(&file, text.replacen("depid=\"1\" deps=\"1\"", "depid=\"-1\" deps=\"-1\"", 1)).unwrap();
    let words = ["wrong.xml: MSCCL: rank 0, threadblock 2, step 3 (re): reads chunk 1 of the scratch buffer"];
    testing::refused(cli(&["schedule", "--program"]).arg(&file), 1, &words);
}

#[cfg(feature = "doctor")]
#[test]
fn a_program_is_proved_and_runs_on_its_ranks() {
    let (pairs, halves) = (example("all-reduce-all-pairs.xml"), example("all-reduce-halves.json"));
    let said = testing::output(&mut cli(&["program", &pairs, "--prove"]));
    assert!(said.starts_with("all_reduce, 3 ranks: proved, in place or not, sums in another order"), "{said}");
    for (file, ranks) in [(&pairs, 3), (&halves, 2)] {
        let said = testing::output(&mut cli(&["program", file, "--size", "1K,64K", "--iters", "2"]));
        assert!(said.contains(&format!("all_reduce, {ranks} ranks: proved")), "{said}");
        assert!(said.contains("Every element was checked on every rank: OK."), "{said}");
    }
}
