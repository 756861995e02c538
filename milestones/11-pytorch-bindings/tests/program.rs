//! Runs the program as a user does. Where Python has neither numpy nor torch it must say so.

use std::process::Command;
use std::time::Duration;

use program_kit::testing::{self, refused, skipped};

fn program() -> Command {
    testing::program(env!("CARGO_BIN_EXE_pytorch-bindings"))
}

fn run(arguments: &[&str]) -> Option<(bool, String)> {
    // Long enough to build the extension first.
    let outcome = testing::run_for(program().args(arguments), Duration::from_secs(1500));
    if outcome.code == Some(77) {
        assert!(outcome.stderr.contains("error: no Python 3.11 or later with numpy or torch here"), "{outcome:?}");
        skipped("ranks of Python", &outcome.stderr);
        return None;
    }
    Some((outcome.success(), outcome.stdout + &outcome.stderr))
}

#[test]
fn ranks_of_python_agree() {
    for ranks in ["1", "2", "3"] {
        let Some((ok, out)) = run(&["--ranks", ranks]) else { return };
        assert!(ok, "{out}");
        assert!(out.contains(&format!("OK: world of size {ranks}")), "{out}");
        assert_eq!(out.contains("Mismatch: rank"), ranks != "1", "{out}");
    }
}

#[test]
fn a_rank_that_raises_ends_the_others() {
    let script = std::env::temp_dir().join(format!("tinynccl-raises-{}.py", std::process::id()));
    let text = "import tinynccl\ncomm = tinynccl.Comm.from_env()\nif comm.rank == 1: raise ValueError('a bug of rank 1')\ncomm.barrier()\n";
    std::fs::write(&script, text).unwrap();
    let outcome = run(&["--ranks", "2", script.to_str().unwrap()]);
    std::fs::remove_file(&script).unwrap();
    let Some((ok, out)) = outcome else { return };
    assert!(!ok && out.contains("ValueError: a bug of rank 1"), "{out}");
}

#[test]
fn no_interpreter_is_status_77() {
    let words = "error: no Python 3.11 or later with numpy or torch here";
    refused(program().args(["--python", "/nonexistent/python"]), 77, &[words]);
}
