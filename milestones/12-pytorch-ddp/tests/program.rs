//! Runs the program as a user does. Where Python has no torch it must say so.

use std::process::Command;
use std::time::Duration;

use program_kit::testing::{self, skipped};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_pytorch-ddp"))
}

fn run(arguments: &[&str]) -> Option<(bool, String)> {
    // Long enough to build the extension first.
    let outcome = testing::run_for(program().args(arguments), Duration::from_secs(1500));
    if outcome.code == Some(77) {
        assert!(outcome.stderr.contains("error: no Python 3.11 or later with torch here"), "{outcome:?}");
        skipped("ranks of Python", &outcome.stderr);
        return None;
    }
    Some((outcome.success(), outcome.stdout + &outcome.stderr))
}

/// Loss of the last epoch.
fn last_loss(out: &str, epoch: &str) -> f64 {
    let line = out.lines().find(|line| line.trim_start().starts_with(epoch)).unwrap_or_else(|| panic!("{out}"));
    line.split_whitespace().nth(1).and_then(|loss| loss.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn the_network_of_milestone_13_learns_as_there_and_as_over_gloo() {
    let Some((ok, out)) = run(&[]) else { return };
    assert!(ok && out.contains("OK: world of size 2"), "{out}");
    assert!(out.contains("largest difference between the weights of both: 0.0"), "{out}");
    // From the table in milestone 13's README: same data, same weights; another library adds in another order.
    approx::assert_abs_diff_eq!(last_loss(&out, "1 "), 1.01768, epsilon = 1e-4);
    approx::assert_abs_diff_eq!(last_loss(&out, "60 "), 0.03118, epsilon = 2e-3);
}

#[test]
fn a_small_gpt_learns() {
    let Some((ok, out)) = run(&[
        "--",
        "--model",
        "gpt",
        "--steps",
        "8",
        "--layers",
        "1",
        "--width",
        "32",
        "--context",
        "32",
        "--rate",
        "0.01",
    ]) else {
        return;
    };
    assert!(ok && out.contains("OK: world of size 2"), "{out}");
    assert!(last_loss(&out, "8 ") < last_loss(&out, "1 ") - 0.5, "{out}");
}
