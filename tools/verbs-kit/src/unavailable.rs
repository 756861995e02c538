//! Distinguishes "it cannot run here" from "it failed" by the exit status, for scripts and tests.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// Exit status of a program that lacks a requirement (a device, a feature). Test runners treat 77 as "skipped".
pub const EXIT_UNAVAILABLE: u8 = 77;

/// One line: the missing requirement and its remedy.
#[derive(Debug)]
pub struct Unavailable(String);

impl Unavailable {
    /// `what` needs the system's libibverbs, and this program was built without it.
    pub fn not_built(what: &str, package: &str) -> Unavailable {
        Unavailable(format!(
            "{what} needs the system's libibverbs, and this program was built without it. Build it with \
             `cargo run -p {package} --features verbs`; that needs cmake, pkg-config, libclang-dev, libnl-route-3-dev \
             and libibverbs-dev (Debian's names)"
        ))
    }

    /// A process that this one started has printed the reason, on a separate line.
    pub fn of_side(side: &str) -> Unavailable {
        Unavailable(format!("the {side} cannot run here; it says why above"))
    }

    /// There is no RDMA device; `cause` is the error from libibverbs.
    pub fn no_device(cause: &str) -> Unavailable {
        Unavailable(format!("no RDMA device here ({cause}). {REMEDY}"))
    }
}

#[cfg(feature = "verbs")]
const REMEDY: &str = "Without `--features verbs` the program brings a device of its own. `scripts/rxe-vm.sh COMMAND` \
    runs a command in a virtual machine that has one. Where the kernel has the module rdma_rxe, \
    `rdma link add rxe0 type rxe netdev eth0` (as root) makes one that sends through eth0";
#[cfg(not(feature = "verbs"))]
const REMEDY: &str = "The program's own device needs a network interface with an address, and TINYROCE_DEVICES must \
    not exclude it";

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Turns `result` into an exit code for `main`: 77 for [`Unavailable`], 1 for any other error, printed as one line.
pub fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One write for the whole line: another process may write to the same terminal.
            let line = format!("{}error: {error:#}\n", crate::say::side());
            let _ = io::stderr().write_all(line.as_bytes());
            if error.downcast_ref::<Unavailable>().is_some() {
                ExitCode::from(EXIT_UNAVAILABLE)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
