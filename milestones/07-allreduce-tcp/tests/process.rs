//! Runs the real program: it starts its own ranks.

use std::process::Command;

use program_kit::testing::{self, output, refused};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_allreduce-tcp"))
}

#[test]
fn two_ranks_show_the_schedule_and_the_table() {
    let out = output(program().args(["--ranks", "2", "--bytes", "0,4,4K,1M", "--iters", "2"]));
    assert!(out.contains("send in[0.0] → 1"), "{out}");
    assert!(out.contains("After 2 hops, 2(n-1): every rank holds every part's sum"), "{out}");
    // 2(n-1)/n of 1 MiB is 1 MiB with two ranks, by the schedule and by the formula.
    let row = out.lines().find(|l| l.trim_start().starts_with("1048576 |")).expect("a row for 1 MiB");
    assert_eq!(row.matches("1048576").count(), 4, "{row}");
    assert!(out.contains("OK"), "{out}");
    let (_, cards) = out.split_once("With a network card of 200 MB/s for each rank").expect("the second table");
    assert_eq!(cards.matches(" | ").count(), 5 * 3, "a heading and four sizes: {cards}");
}

#[test]
fn three_ranks_and_a_count_that_does_not_divide() {
    let out = output(program().args(["--ranks", "3", "--count", "1001", "--iters", "1"]));
    assert!(out.contains("After 4 hops") && out.contains("OK"), "{out}");
}

#[test]
fn the_ring_in_chunks_is_timed_beside_the_others() {
    let out = output(program().args(["--ranks", "3", "--chunks", "1,4", "--bytes", "4,64K", "--iters", "1"]));
    let rows = ["hop by hop |", "1 chunk |", "4 chunks |", "the library's |"];
    assert!(rows.iter().all(|row| out.contains(row)) && out.contains("OK"), "{out}");
}

#[test]
fn bad_input_is_one_line_and_a_code() {
    refused(program().args(["--bytes", "3"]), 2, &["multiple of 4"]);
    refused(program().args(["--bytes", "1X"]), 2, &["K, M or G"]);
    refused(program().args(["--count", "1", "--bytes", "4"]), 2, &["cannot be used with"]);
    refused(program().args(["--chunks", "0"]), 2, &["--chunks"]);
    refused(program().args(["--iters", "0"]), 2, &["--iters"]);
    refused(program().args(["--ranks", "1000"]), 2, &["1..=256"]);
    refused(program().args(["--ranks", "2", "--count", "9999999999999999"]), 77, &["error: 2 ranks would need"]);
}
