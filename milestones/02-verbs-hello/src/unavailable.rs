//! "It cannot run here", kept apart from "it failed": scripts and tests tell one from the other by the exit status.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// Exit status of a program that lacks what it needs (a device, a feature). Test runners know 77 as "skipped".
pub const EXIT_UNAVAILABLE: u8 = 77;

/// What is missing and what to do about it, in one line.
#[derive(Debug)]
pub struct Unavailable(String);

impl Unavailable {
    /// The program was built without the cargo feature `verbs`.
    pub fn not_built(package: &str) -> Unavailable {
        Unavailable(format!(
            "this program was built without RDMA. Build it with `cargo run -p {package} --features verbs`; that needs \
             cmake, pkg-config, libclang-dev, libnl-route-3-dev and libibverbs-dev (Debian's names)"
        ))
    }

    /// There is no RDMA device; `cause` is what libibverbs said.
    pub fn no_device(cause: &str) -> Unavailable {
        Unavailable(format!(
            "no RDMA device here ({cause}). `scripts/rxe-vm.sh COMMAND` runs a command in a virtual machine that has \
             one. Where the kernel has the module rdma_rxe, `rdma link add rxe0 type rxe netdev eth0` (as root) makes \
             one that sends through eth0"
        ))
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// What `main` returns for `result`: prints an error as one line; 77 for [`Unavailable`], 1 for any other error.
pub fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one piece: another process may write to the same terminal.
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
