//! Connections that are encrypted.

use std::process::{Command, Output};

use super::api::{Api, LOG};

const REFUSED: &str = "TINYNCCL_TEST_REFUSED";

/// Runs tests of this program in a process that encrypts.
fn again(tests: &[&str], settings: &[(&str, &str)]) -> (Output, String) {
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(tests).env("TINYNCCL_ENCRYPT", "1").env_remove("TINYNCCL_SECRET").envs(settings.iter().copied());
    let output = again.output().unwrap();
    let text = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).join("\n");
    (output, text)
}

/// All of that again: within a process, over cables of which one is cut, and through relays, which see records alone.
#[test]
fn what_holds_in_clear_text_holds_encrypted() {
    let secret = ("TINYNCCL_SECRET", "the secret of this job");
    let (run, text) = again(&["transfers::", "ring::", "failures::", "rails::", "relays::"], &[secret]);
    assert!(run.status.success(), "{text}");
}

/// A process that is not to start.
#[test]
fn refused() {
    if std::env::var_os(REFUSED).is_none() {
        return;
    }
    assert!(std::panic::catch_unwind(|| Api::init(12)).is_err());
    println!("\nlog: {}", LOG.lock().unwrap());
}

#[test]
fn without_a_secret_nothing_is_encrypted_with_handles_that_were_sent_in_clear_text() {
    let (_, text) = again(&["--exact", "sealed::refused", "--nocapture"], &[(REFUSED, "1")]);
    let line = text.lines().find(|line| line.contains("TINYNCCL_ENCRYPT")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("NCCL's bootstrap") && line.contains("set TINYNCCL_SECRET"), "{line}");
}
