//! A program as its user starts it, in a test. Everything here panics, as a test does, when the program does not do
//! what was expected, and then shows all that the program said.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::{self, Outcome};

/// Time limit of every program, so long that only an endless wait reaches it.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Variables that make a program a rank. A test that itself runs under a launcher must not pass them on.
const LAUNCHERS: [&str; 7] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TINYNCCL_UNIQUE_ID"];

/// The program at `path`, outside any launcher's environment: `program(env!("CARGO_BIN_EXE_…"))`.
pub fn program(path: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(path);
    for name in LAUNCHERS {
        command.env_remove(name);
    }
    command
}

/// The program that the variable `name` points to, where a test runs on a machine that has no cargo
/// (scripts/gpu-tests.sh); else the one at `path`.
pub fn program_or(name: &str, path: &str) -> Command {
    program(std::env::var_os(name).unwrap_or_else(|| path.into()))
}

/// Runs the program to its end.
pub fn run(command: &mut Command) -> Outcome {
    run_for(command, LIMIT)
}

/// [`run`] with another limit.
pub fn run_for(command: &mut Command, limit: Duration) -> Outcome {
    let outcome = process::run(command, limit).unwrap_or_else(|error| panic!("{command:?}: {error:#}"));
    assert!(!outcome.late, "{command:?} still runs after {limit:?}:\n{}{}", outcome.stdout, outcome.stderr);
    outcome
}

/// Runs the program, which must succeed, and gives its output.
pub fn output(command: &mut Command) -> String {
    let outcome = run(command);
    assert!(outcome.success(), "{command:?}: {:?}\n{}{}", outcome.code, outcome.stdout, outcome.stderr);
    outcome.stdout
}

/// Runs the program, which must end with `code` and say each of `words` on standard error, which it gives.
pub fn refused(command: &mut Command, code: i32, words: &[&str]) -> String {
    let outcome = run(command);
    assert_eq!(outcome.code, Some(code), "{command:?}: {}{}", outcome.stdout, outcome.stderr);
    for word in words {
        assert!(outcome.stderr.contains(word), "{command:?}: no {word:?} in: {}", outcome.stderr);
    }
    outcome.stderr
}

/// Compiles a C program, or a library with `-shared` among the options, in `folder`; its path.
pub fn compiled(folder: &Path, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let (file, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&file, source).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    output(Command::new("cc").args(["-fPIC", "-o"]).args([&program, &file]).args(options));
    program
}

/// Says that a test leaves something out, and why. Not by a macro: the test harness would keep it to itself.
pub fn skipped(what: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {what}: {}", why.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = program("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn what_is_expected_is_given() {
        assert_eq!(output(&mut sh("echo out; echo err >&2")), "out\n");
        assert_eq!(refused(&mut sh("echo bad >&2; exit 2"), 2, &["bad"]), "bad\n");
        assert_eq!(output(program_or("TINYNCCL_NO_SUCH_VARIABLE", "true").env("RANK", "0")), "");
        assert_eq!(output(&mut sh("echo ${RANK-none}${WORLD_SIZE-none}")), "nonenone\n");
    }

    #[test]
    #[should_panic(expected = "no \"worse\" in: bad")]
    fn a_word_that_is_not_said() {
        refused(&mut sh("echo bad >&2; exit 2"), 2, &["bad", "worse"]);
    }

    #[test]
    #[should_panic(expected = "the reason")]
    fn a_failure_shows_what_was_said() {
        output(&mut sh("echo the reason >&2; exit 1"));
    }

    #[test]
    #[should_panic(expected = "still runs after")]
    fn a_program_that_hangs() {
        run_for(&mut sh("exec sleep 600"), Duration::from_millis(100));
    }
}
