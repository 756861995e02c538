//! "It cannot run here", kept apart from "it failed": scripts and tests tell one from the other by the exit status.

use std::fmt;
use std::process::ExitCode;

/// Exit status of a program that lacks what it needs. Test runners know 77 as "skipped".
pub const EXIT_UNAVAILABLE: u8 = 77;

/// What is missing, and what to do about it: one line.
#[derive(Debug, PartialEq, Eq)]
pub struct Unavailable(pub String);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// What `main` returns for the ranks' exit code, or for an error, which it prints: 77 for [`Unavailable`], 1 for any other.
pub fn exit_code(result: anyhow::Result<i32>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {error:#}");
            match error.downcast_ref::<Unavailable>() {
                Some(_) => ExitCode::from(EXIT_UNAVAILABLE),
                None => ExitCode::FAILURE,
            }
        }
    }
}
