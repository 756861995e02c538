//! Runs the real program: it starts its own ranks.

use std::time::Duration;

use assert_cmd::Command;

/// The program, outside any launcher's environment.
fn program() -> Command {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("ddp-sine");
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TINYNCCL_UNIQUE_ID"]
    {
        command.env_remove(name);
    }
    command.timeout(Duration::from_secs(120));
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Fails with `code` and says each of `words` on standard error.
fn refused(command: &mut Command, code: i32, words: &[&str]) {
    let output = command.output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    for word in words {
        assert!(errors.contains(word), "no {word:?} in: {errors}");
    }
}

#[test]
fn two_ranks_fit_and_draw() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fit.svg");
    let output = program().args(["--ranks", "2", "--plot"]).arg(&path).output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
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
    refused(program().args(["--batch", "47"]), 1, &["error: a global batch of 47", "multiple of 2"]);
    refused(program().args(["--plot", "/nowhere/fit.svg"]), 1, &["error: --plot", "no folder /nowhere"]);
}
