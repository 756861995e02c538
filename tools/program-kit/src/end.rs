//! The end of a program: its error line and its exit status.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::{Error, Result};

use crate::memory::Lack;

/// Exit status of a program that lacks what it needs: a device, a driver, a feature of the build. Test runners know 77
/// as "skipped".
pub const UNAVAILABLE: u8 = 77;

/// Exit status of wrong usage, as clap has it.
const USAGE: u8 = 2;

/// Wrong usage of the command line: settings that do not fit together, a name that is none.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The return value of `main`: the exit code in `result`. An error is printed as one line, and gives [`UNAVAILABLE`]
/// where `lacks` says that the machine or the build lacks something, or memory does ([`Lack`]), 2 where it is a [`Usage`], else 1.
pub fn exit_code(result: Result<i32>, lacks: impl FnOnce(&Error) -> bool) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            // One write, so that the lines of several ranks do not mix.
            let word = red("error:", std::io::stderr().is_terminal());
            let _ = std::io::stderr().write_all(format!("{word} {error:#}\n").as_bytes());
            match () {
                () if error.is::<Lack>() || lacks(&error) => ExitCode::from(UNAVAILABLE),
                () if error.is::<Usage>() => ExitCode::from(USAGE),
                () => ExitCode::FAILURE,
            }
        }
    }
}

/// `text` in red on a `terminal`, unless the variable `NO_COLOR` is set (<https://no-color.org>).
pub fn red(text: &str, terminal: bool) -> String {
    painted(text, "31", terminal, no_color())
}

/// [`red`], in green.
pub fn green(text: &str, terminal: bool) -> String {
    painted(text, "32", terminal, no_color())
}

fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

fn painted(text: &str, code: &str, terminal: bool, plain: bool) -> String {
    if terminal && !plain { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
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
        let usage = Err(Error::from(Usage("no".to_owned())).context("reading the arguments"));
        assert_eq!(status(usage, false), code(2));
    }

    #[test]
    fn colours_are_for_terminals() {
        assert_eq!(painted("x", "31", true, false), "\x1b[31mx\x1b[0m");
        assert_eq!([painted("x", "31", false, false), painted("x", "31", true, true)], ["x", "x"]);
    }
}
