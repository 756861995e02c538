//! The program from outside: it trains, resumes, and answers bad input with one clear line before any training.

use std::fs;
use std::path::Path;
use std::process::Command;

use program_kit::testing;
use tempfile::TempDir;

/// A folder with a text to learn.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..600).map(|i| ["to be ", "or not ", "to sum\n"][(i * i + i / 5) % 3]).collect();
    fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

fn program(folder: &Path, args: &[&str]) -> Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
    command.current_dir(folder).args(["--preset", "tiny"]).args(args);
    command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
    command
}

/// Runs and expects a failure; returns the one line that it must print. Settings that do not fit together are wrong
/// usage.
fn refused(folder: &Path, args: &[&str]) -> String {
    let outcome = testing::run(&mut program(folder, args));
    let (out, err) = (outcome.stdout, outcome.stderr);
    let code = if err.contains("is not a multiple of") { 2 } else { 1 };
    assert_eq!((outcome.code, err.lines().count()), (Some(code), 1), "{args:?}: {out}{err}");
    assert!(err.starts_with("error: "), "{err}");
    assert!(!out.contains("loss"), "trained before it noticed: {out}");
    err
}

fn trained(folder: &Path, args: &[&str]) -> String {
    testing::output(&mut program(folder, args))
}

const ALONE: [&str; 6] = ["--ranks", "1", "--threads", "1", "--data", "text.txt"];

fn alone<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&ALONE[..], more].concat()
}

#[test]
fn trains_draws_saves_and_resumes() {
    let folder = folder();
    let out = trained(folder.path(), &alone(&["--steps", "20", "--out", "o", "--sample-chars", "30"]));
    for part in ["step    20/20", "validation loss", "tokens/s", "communication", "sample", "done: 20 steps"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let svg = fs::read_to_string(folder.path().join("o/loss.svg")).unwrap();
    assert!(svg.contains("nats per character"));
    let more = ["--steps", "25", "--out", "o2", "--resume", "o/checkpoint.bin"];
    let out = trained(folder.path(), &alone(&more));
    assert!(out.contains("after 20 of 25 steps") && out.contains("step    25/25"), "{out}");
}

#[test]
fn bad_texts() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("short.txt"), "to be").unwrap();
    fs::write(at("empty.txt"), "").unwrap();
    fs::write(at("latin1.txt"), b"caf\xe9 ".repeat(300)).unwrap();
    let e = refused(folder.path(), &["--data", "missing.txt"]);
    assert!(e.contains("missing.txt") && e.contains("No such file"), "{e}");
    let e = refused(folder.path(), &["--data", "."]);
    assert!(e.contains("cannot read the text"), "{e}");
    for name in ["short.txt", "empty.txt"] {
        let e = refused(folder.path(), &["--data", name]);
        assert!(e.contains(name) && e.contains("too short") && e.contains("at least 170"), "{e}");
    }
    let e = refused(folder.path(), &["--data", "latin1.txt"]);
    assert!(e.contains("not UTF-8: byte 3 is 0xe9"), "{e}");
}

#[test]
fn bad_places_and_sizes() {
    let folder = folder();
    fs::write(folder.path().join("file"), "").unwrap();
    let e = refused(folder.path(), &["--data", "text.txt", "--out", "file/o"]);
    assert!(e.contains("output folder file/o"), "{e}");
    let e = refused(folder.path(), &["--data", "text.txt", "--ranks", "5"]);
    assert!(e.contains("--batch 12 is not a multiple of 5 ranks"), "{e}");
}

#[test]
fn bad_checkpoints_are_named_and_left_alone() {
    let folder = folder();
    trained(folder.path(), &alone(&["--steps", "3", "--out", "o", "--sample-chars", "0"]));
    let good = fs::read(folder.path().join("o/checkpoint.bin")).unwrap();
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let mut version = good.clone();
    version[8] = 77;
    for (bytes, part) in [
        (&good[..10], "cut off: expected at least 16 bytes, got 10"),
        (&good[..good.len() - 100], "cut off or damaged: expected"),
        (&flipped[..], "expected checksum"),
        (&version[..], "version: expected 1, got 77"),
        (b"something else altogether", "wrong magic"),
    ] {
        let path = folder.path().join("bad");
        fs::write(&path, bytes).unwrap();
        let e = refused(folder.path(), &alone(&["--resume", "bad"]));
        assert!(e.contains("bad is no checkpoint") && e.contains(part), "{part}: {e}");
        assert_eq!(fs::read(&path).unwrap(), bytes, "the file was touched");
    }
    let e = refused(folder.path(), &alone(&["--resume", "none"]));
    assert!(e.contains("cannot read the checkpoint none"), "{e}");
    let e = refused(folder.path(), &alone(&["--resume", "o/checkpoint.bin", "--steps", "2"]));
    assert!(e.contains("has 3 done"), "{e}");
    fs::write(folder.path().join("other.txt"), "0123456789".repeat(100)).unwrap();
    let e = refused(folder.path(), &["--data", "other.txt", "--resume", "o/checkpoint.bin"]);
    assert!(e.contains("another vocabulary: expected the text's 10 characters, got"), "{e}");
    let mut other = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
    other.current_dir(folder.path()).args(["--preset", "small", "--data", "text.txt", "--resume", "o/checkpoint.bin"]);
    testing::refused(&mut other, 1, &["another shape: expected 4 layers", "got 2 layers"]);
    assert_eq!(fs::read(folder.path().join("o/checkpoint.bin")).unwrap(), good);
}

#[test]
fn wrong_flags_are_usage_errors() {
    let folder = folder();
    for args in [
        &["--steps", "0"][..],
        &["--steps", "1.5"],
        &["--lr", "fast"],
        &["--lr", "nan"],
        &["--lr", "0"],
        &["--dropout", "1"],
        &["--ranks", "0"],
        &["--threads", "0"],
        &["--temperature", "cold"],
        &["--preset", "huge"],
        &["--local-steps", "0"],
        &["--outer-lr", "0", "--local-steps", "5"],
        &["--outer-momentum", "1", "--local-steps", "5"],
        &["--no-such-flag"],
    ] {
        let mut command = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
        testing::refused(command.current_dir(folder.path()).args(args), 2, &[args[0]]);
    }
    for (args, parts) in [
        (&["--local-steps", "5", "--device", "cuda"][..], ["--local-steps", "--device cpu"]),
        (&["--outer-lr", "0.5"], ["--local-steps", "required"]),
    ] {
        let mut command = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
        command.current_dir(folder.path()).args(["--preset", "tiny", "--data", "text.txt"]).args(args);
        testing::refused(&mut command, 2, &parts);
    }
}
