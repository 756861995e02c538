//! What a registered buffer does not let one do, found by the compiler.
//!
//! Compilers differ in their words, so this runs with the one that they were recorded with. To record them again, which
//! also shows what changed: `TRYBUILD=overwrite cargo test -p tinynccl --test cpu compile_fail`, and the new version
//! below.

use std::io::Write;
use std::process::Command;

const RECORDED_WITH: &str = "rustc 1.95.";

#[test]
fn registered_memory_cannot_be_freed_moved_or_shared_with_a_call() {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler).arg("--version").output().unwrap();
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    if !version.starts_with(RECORDED_WITH) && std::env::var_os("TRYBUILD").is_none() {
        let words = format!("SKIPPED: compile-fail tests: recorded with {RECORDED_WITH}x, this is {}", version.trim());
        let _ = writeln!(std::io::stderr().lock(), "{words}");
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
