//! Ranks as processes: this program again, once per rank.

use std::fmt;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Error as AnyError, Result, anyhow};
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Config, Error};
use verbs_hello::unavailable::Unavailable;

use crate::{CANNOT_RUN_HERE, FAILED_AS_ANNOUNCED};

/// This machine cannot do the lab.
#[derive(Debug)]
pub(crate) struct CannotRunHere(pub(crate) String);

impl fmt::Display for CannotRunHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this lab cannot run here: {}", self.0)
    }
}

impl std::error::Error for CannotRunHere {}

/// The failure that the lab is about, where it is no error of the library.
#[derive(Debug)]
pub(crate) struct Announced(pub(crate) String);

impl fmt::Display for Announced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Announced {}

/// Prints an error as one line, in one piece, because other ranks write to the same terminal.
pub(crate) fn failure(error: &AnyError) -> ExitCode {
    let _ = std::io::stderr().write_all(format!("error: {error:#}\n").as_bytes());
    ExitCode::from(match () {
        () if error.is::<CannotRunHere>() || error.is::<Unavailable>() => CANNOT_RUN_HERE,
        () if error.is::<Announced>() => FAILED_AS_ANNOUNCED,
        () => 1,
    })
}

/// A lab whose ranks are processes.
pub(crate) struct Job {
    pub(crate) ranks: usize,
    /// Seconds without progress before a call fails, unless the environment says otherwise.
    pub(crate) timeout: u32,
    /// Variables for every rank, unless they are set.
    pub(crate) settings: &'static [(&'static str, &'static str)],
    /// What ends a rank in the failure of this lab.
    pub(crate) announced: fn(&Error) -> bool,
    /// The launcher's exit code then: 3, or 128 and the signal of a rank that was killed.
    pub(crate) code: i32,
}

impl Job {
    /// Starts the ranks, or is one of them.
    pub(crate) fn run(&self, rank: impl FnOnce(Comm) -> Result<()>) -> Result<u8> {
        if !launch::is_rank() {
            return self.launch();
        }
        let outcome = Config::from_env().and_then(Comm::from_env_with).map_err(AnyError::from).and_then(rank);
        outcome.map(|()| 0).map_err(|error| match error.downcast_ref::<Error>() {
            Some(cause) if (self.announced)(cause) => Announced(format!("{error:#}")).into(),
            _ => error,
        })
    }

    fn launch(&self) -> Result<u8> {
        let timeout = self.timeout.to_string();
        // The figures of the cost model are the built-in ones, so that every machine chooses the same algorithms.
        let always = [("TINYNCCL_TIMEOUT", timeout.as_str()), ("TINYNCCL_TUNE", "off")];
        let mut launcher = Launcher::new(self.ranks).kill_grace(Duration::from_millis(200));
        for (name, value) in always.iter().chain(self.settings) {
            if std::env::var_os(name).is_none() {
                launcher = launcher.env(name, value);
            }
        }
        match launcher.run_self()? {
            0 => Ok(0),
            code if code == self.code => Ok(FAILED_AS_ANNOUNCED),
            code if code == i32::from(CANNOT_RUN_HERE) => Ok(CANNOT_RUN_HERE),
            code => Err(anyhow!("the job ended with code {code}: expected 0, or {} for this lab's failure", self.code)),
        }
    }
}
