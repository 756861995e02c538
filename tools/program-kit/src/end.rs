//! How a program ends.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Error, Result};

/// Exit status of a program that lacks what it needs: a device, a driver, a feature of the build. Test runners know 77
/// as "skipped".
pub const UNAVAILABLE: u8 = 77;

/// The return value of `main`: the exit code in `result`. An error is printed as one line, and gives [`UNAVAILABLE`]
/// where `lacks` says that the machine or the build lacks something, else 1.
pub fn exit_code(result: Result<i32>, lacks: impl FnOnce(&Error) -> bool) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            // One write, so that the lines of several ranks do not mix.
            let _ = std::io::stderr().write_all(format!("error: {error:#}\n").as_bytes());
            if lacks(&error) { ExitCode::from(UNAVAILABLE) } else { ExitCode::FAILURE }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_status() {
        let status = |result, lacks| format!("{:?}", exit_code(result, |_| lacks));
        let code = |n: u8| format!("{:?}", ExitCode::from(n));
        assert_eq!([status(Ok(0), true), status(Ok(3), true), status(Ok(-9), true)], [code(0), code(3), code(1)]);
        let error = || Err(anyhow::anyhow!("the error of a test"));
        assert_eq!([status(error(), false), status(error(), true)], [code(1), code(77)]);
    }
}
