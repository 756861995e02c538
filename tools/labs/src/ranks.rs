//! Ranks as processes: this program again, once per rank.

use std::fs;
use std::io::Write as _;
use std::thread;
use std::time::Duration;

use anyhow::{Error as AnyError, Result, anyhow};
use program_kit::Usage;
use rustix::process::{Signal, getegid, geteuid};
use rustix::thread::UnshareFlags;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Config, Error};
use verbs_kit::unavailable::Unavailable;

use crate::{CANNOT_RUN_HERE, FAILED_AS_ANNOUNCED};

/// This machine cannot do the lab.
#[derive(Debug, thiserror::Error)]
#[error("this lab cannot run here: {0}")]
pub(crate) struct CannotRunHere(pub(crate) String);

/// The failure that the lab is about, where it is no error of the library.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Announced(pub(crate) String);

/// Prints an error as one line, in one write, because other ranks write to the same terminal. Returns the exit status.
pub(crate) fn failure(error: &AnyError) -> u8 {
    let _ = std::io::stderr().write_all(format!("error: {error:#}\n").as_bytes());
    match () {
        () if error.is::<CannotRunHere>() || error.is::<Unavailable>() => CANNOT_RUN_HERE,
        () if error.is::<Announced>() => FAILED_AS_ANNOUNCED,
        () if error.is::<Usage>() => 2,
        () => 1,
    }
}

/// A lab whose ranks are processes.
pub(crate) struct Job {
    ranks: usize,
    timeout: u32,
    announced: fn(&Error) -> bool,
    settings: &'static [(&'static str, &'static str)],
    code: i32,
    grace: Duration,
}

impl Job {
    /// `ranks` ranks, whose calls fail after `timeout` seconds without progress unless the environment sets a limit.
    /// In the failure of this lab an `announced` error ends a rank.
    pub(crate) fn new(ranks: usize, timeout: u32, announced: fn(&Error) -> bool) -> Job {
        let code = FAILED_AS_ANNOUNCED.into();
        Job { ranks, timeout, announced, settings: &[], code, grace: Duration::from_secs(2) }
    }

    /// Variables for every rank, unless they are set.
    pub(crate) fn with(self, settings: &'static [(&'static str, &'static str)]) -> Job {
        Job { settings, ..self }
    }

    /// A signal kills a rank in the failure of this lab; the launcher's exit code then is 128 and the signal.
    pub(crate) fn killed_by(self, signal: Signal) -> Job {
        Job { code: 128 + signal.as_raw(), ..self }
    }

    /// Sets the time that the other ranks may go on when one has ended, before the launcher ends them.
    pub(crate) fn grace(self, grace: Duration) -> Job {
        Job { grace, ..self }
    }

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
        let mut launcher = Launcher::new(self.ranks).grace(self.grace).kill_grace(Duration::from_millis(200));
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

/// Runs `work` on each rank as a thread of this process; returns the results by rank, or the first error.
pub(crate) fn in_threads<T: Send>(comms: Vec<Comm>, work: impl Fn(&Comm) -> Result<T> + Sync) -> Result<Vec<T>> {
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || work(&comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked")))).collect()
    })
}

/// The error where `what`, which needs a namespace, is refused.
pub(crate) fn refused(what: &str, cause: impl std::fmt::Display) -> CannotRunHere {
    CannotRunHere(format!("{what}: {cause}; it needs root, or user namespaces (sysctl user.max_user_namespaces)"))
}

/// Takes this process, which has one thread yet, to separate namespaces, in which it is root.
pub(crate) fn unshare(flags: UnshareFlags, what: &str) -> Result<(), CannotRunHere> {
    let (user, group) = (geteuid(), getegid());
    let flags = if user.is_root() { flags } else { flags | UnshareFlags::NEWUSER };
    // SAFETY: this process has one thread yet, and keeps its descriptors.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(|e| refused(what, e))?;
    if user.is_root() {
        return Ok(());
    }
    // Without setgroups no group could be gained by it, which is why the kernel wants it gone first.
    let (user, group) = (format!("0 {} 1", user.as_raw()), format!("0 {} 1", group.as_raw()));
    for (file, text) in [("setgroups", "deny"), ("uid_map", &user), ("gid_map", &group)] {
        fs::write(format!("/proc/self/{file}"), text).map_err(|e| refused(file, e))?;
    }
    Ok(())
}
