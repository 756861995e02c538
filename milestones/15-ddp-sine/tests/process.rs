//! Runs the program, which starts its own ranks.

use std::process::Command;

use program_kit::testing::{self, output, refused};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_ddp-sine"))
}

#[test]
fn two_ranks_fit_and_draw() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fit.svg");
    let out = output(program().args(["--ranks", "2", "--plot"]).arg(&path));
    assert!(out.contains("OK: below 1e-3") && out.contains("2 ranks hold the same"), "{out}");
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("prediction"), "{}", &svg[..100]);
}

#[test]
fn a_bad_fit_is_an_error_but_the_plot_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fit.svg");
    refused(program().args(["--epochs", "1", "--plot"]).arg(&path), 1, &["error: the fit is bad", "more --epochs"]);
    assert!(path.exists());
}

#[test]
fn bad_input_is_one_line_and_a_code() {
    refused(program().args(["--ranks", "0"]), 2, &["1..=256"]);
    refused(program().args(["--epochs", "0"]), 2, &["--epochs"]);
    refused(program().args(["--batch", "47"]), 2, &["error: a global batch of 47", "multiple of 2"]);
    refused(program().args(["--plot", "/nowhere/fit.svg"]), 2, &["error: --plot", "no folder /nowhere"]);
}
