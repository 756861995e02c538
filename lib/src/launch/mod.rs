//! Starts the ranks of a program on this machine, so that a program run alone needs no `mpirun` or `torchrun`.
//!
//! The launcher hosts the rendezvous store, gives every rank its environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
//! `LOCAL_WORLD_SIZE`, `TINYNCCL_UNIQUE_ID`), puts `[rank r] ` before each line of their output, passes signals on,
//! ends the other ranks when one fails, and names that one.
//!
//! ```no_run
//! use tinynccl::launch::{self, Launcher};
//!
//! fn main() -> tinynccl::Result<()> {
//!     if !launch::is_rank() {
//!         std::process::exit(Launcher::new(2).plain_rank0(true).run_self()?);
//!     }
//!     // … here every process is a rank …
//!     Ok(())
//! }
//! ```

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

mod output;
mod signals;
mod spawn;
mod supervise;

#[cfg(test)]
mod tests;

pub use tinynccl_transport::bootstrap::is_rank;

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;
use tinynccl_transport::bootstrap::Server;

const OP: &str = "launch";

/// More ranks than this on one machine are taken for a slip of the finger.
const MAX_RANKS: usize = 4096;

/// Destination of output.
type Sink = Arc<Mutex<dyn Write + Send>>;

/// Starts ranks as processes of this machine and waits for them.
#[must_use]
pub struct Launcher {
    ranks: usize,
    program: Option<PathBuf>,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    plain_rank0: bool,
    elastic: bool,
    grace: Duration,
    kill_grace: Duration,
    stdout: Sink,
    stderr: Sink,
}

impl std::fmt::Debug for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launcher")
            .field("ranks", &self.ranks)
            .field("program", &self.program)
            .field("args", &self.args)
            .field("plain_rank0", &self.plain_rank0)
            .finish_non_exhaustive()
    }
}

impl Launcher {
    /// A launcher of this many ranks.
    pub fn new(ranks: usize) -> Self {
        Launcher {
            ranks,
            program: None,
            args: Vec::new(),
            env: Vec::new(),
            plain_rank0: false,
            elastic: false,
            grace: Duration::from_secs(2),
            kill_grace: Duration::from_secs(5),
            stdout: Arc::new(Mutex::new(std::io::stdout())),
            stderr: Arc::new(Mutex::new(std::io::stderr())),
        }
    }

    /// Sets a variable for every rank.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// The program that every rank runs.
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.program = Some(path.into());
        self
    }

    /// Arguments of the program, after those given before.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Rank 0 keeps this process's standard output and error as they are, with no prefix, so that its tables and
    /// progress bars stay whole. Default: every rank's lines get a prefix. Rank 0 has our standard input in both cases,
    /// the others have none.
    pub fn plain_rank0(mut self, plain: bool) -> Self {
        self.plain_rank0 = plain;
        self
    }

    /// Leaves the other ranks alone when one fails: they go on without it
    /// ([`Comm::shrink`](tinynccl_comm::Comm::shrink)). The exit code is 0 if a rank ends well. Default: false.
    pub fn elastic(mut self, elastic: bool) -> Self {
        self.elastic = elastic;
        self
    }

    /// Sets the time that the other ranks have after one failed, to print their own errors, before they get SIGTERM.
    /// Default 2 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets the time that the other ranks have after SIGTERM before they get SIGKILL. Default 5 s.
    pub fn kill_grace(mut self, grace: Duration) -> Self {
        self.kill_grace = grace;
        self
    }

    /// Runs this program again, with the same arguments, once per rank. See [`Launcher::run`].
    pub fn run_self(mut self) -> Result<i32> {
        let exe = spawn::own_path(std::env::current_exe())?;
        self.program = Some(exe);
        self.args = std::env::args_os().skip(1).collect();
        self.run()
    }

    /// Starts the ranks and waits for all of them. The exit code: 0, or that of the rank that failed first (128 +
    /// signal if a signal killed it). Which one that was goes to standard error: the store sees which rank goes first,
    /// as those that wait for it may be gone before its process is.
    ///
    /// - SIGINT, SIGTERM and SIGHUP go on to the ranks (a Ctrl-C at the terminal has reached them already). A second
    ///   one ends them: SIGTERM, then SIGKILL.
    /// - When a rank fails, unless the launcher is `elastic`, the others get `grace` to end by themselves, then
    ///   SIGTERM, and `kill_grace` later SIGKILL.
    /// - When the launcher dies, whatever the reason, the kernel kills the ranks. It does so when the *thread* that
    ///   called this ends: the call blocks it until then.
    ///
    /// Fails when a rank cannot be started; those which were started are then ended.
    pub fn run(self) -> Result<i32> {
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            return Err(Error::invalid(OP, format!("{} ranks: expected 1 to {MAX_RANKS}", self.ranks)));
        }
        let config = Config::from_env()?;
        let bind = (Ipv4Addr::LOCALHOST, 0).into();
        let server = Server::start(bind, self.ranks, &config)?;
        let signals = signals::Signals::watch()?;
        let mut relays = output::Relays::new();
        let children = spawn::all(&self, &server.unique_id(), &mut relays)?;
        let code = supervise::supervise(children, &self, &server, &signals);
        relays.finish();
        Ok(code)
    }
}
