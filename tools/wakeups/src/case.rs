//! The parameters of a run: fence, threads or processes, time of the registration, and whether the two sides are
//! pinned.

use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use program_kit::machine;

use crate::fence::Fence;
use crate::race::{Shared, link_between_threads, sleeper, waker};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Where {
    Threads,
    Processes,
}

/// Time at which the waker's process registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registered {
    /// While it has one thread, which has run on the core that the waker is to use.
    Early,
    /// While its waker sleeps on that core.
    Late,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) fence: Fence,
    pub(crate) place: Where,
    pub(crate) registered: Registered,
    pub(crate) pinned: bool,
}

/// Time that a core runs a process before that counts as having run there.
const STAY: Duration = Duration::from_millis(2);

impl Case {
    /// Every meaningful combination.
    pub(crate) fn all() -> Vec<Case> {
        let mut all = Vec::new();
        for &fence in Fence::value_variants() {
            for &place in Where::value_variants() {
                for registered in [Registered::Early, Registered::Late] {
                    for pinned in [true, false] {
                        let late = registered == Registered::Late;
                        let between_threads = matches!(fence, Fence::Private | Fence::Link);
                        if late && !fence.registers() || between_threads && place == Where::Processes {
                            continue;
                        }
                        all.push(Case { fence, place, registered, pinned });
                    }
                }
            }
        }
        all
    }

    /// Runs it in this process, which has one thread and has not registered; the number of lost wake-ups.
    pub(crate) fn run(&self, rounds: u64) -> Result<u64> {
        if self.fence == Fence::Link {
            return link_between_threads(self, rounds);
        }
        let shared = Shared::new()?;
        match self.place {
            Where::Threads => self.waker_here(&shared, rounds, |shared| sleeper(shared, self.fence, rounds)),
            Where::Processes => {
                // SAFETY: this process has one thread, so the child finds nothing half done.
                match unsafe { libc::fork() } {
                    -1 => bail!("fork: {}", std::io::Error::last_os_error()),
                    0 => {
                        let outcome = self.waker_here(&shared, rounds, |_| Ok(0));
                        if let Err(e) = &outcome {
                            eprintln!("waker: {e:#}");
                            shared.give_up();
                        }
                        // SAFETY: the child ends here; its memory but `shared` is its own.
                        unsafe { libc::_exit(i32::from(outcome.is_err())) }
                    }
                    child => {
                        self.pin_to(0)?;
                        self.fence.register()?;
                        let lost = sleeper(&shared, self.fence, rounds);
                        reap(child)?;
                        lost
                    }
                }
            }
        }
    }

    /// The waker as a thread of this process, which registers as the case has it, beside `other` on the calling thread.
    fn waker_here(&self, shared: &Shared, rounds: u64, other: impl FnOnce(&Shared) -> Result<u64>) -> Result<u64> {
        self.pin_to(1)?;
        stay();
        self.pin_to(0)?;
        if self.registered == Registered::Early {
            self.fence.register()?;
        }
        let (gate, open) = rustix::pipe::pipe().context("a pipe")?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.pin_to(1)?;
                pass(&gate)?;
                waker(shared, self.fence, rounds);
                anyhow::Ok(())
            });
            // The waker sleeps at the gate by now, and its core idles with our memory loaded.
            stay();
            let registered = if self.registered == Registered::Late { self.fence.register() } else { Ok(()) };
            rustix::io::write(&open, b"x").context("opening the gate")?;
            registered?;
            let lost = other(shared);
            thread.join().map_err(|_| anyhow::anyhow!("the waker panicked"))??;
            lost
        })
    }

    /// Pins this thread to the first or second core that the process may use, if the case is a pinned one.
    pub(crate) fn pin_to(&self, which: usize) -> Result<()> {
        let cores = cores()?;
        match cores.get(which) {
            _ if !self.pinned => Ok(()),
            Some(&core) => machine::pin(core),
            None => bail!("expected two cores to run on, got {}", cores.len()),
        }
    }
}

/// `FENCE/WHERE/REGISTERED/PINNED`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let registered = if self.registered == Registered::Early { "early" } else { "late" };
        write!(f, "{}/{}/{registered}/{}", self.fence, self.place, if self.pinned { "pinned" } else { "free" })
    }
}

impl FromStr for Case {
    type Err = String;
    fn from_str(text: &str) -> Result<Case, String> {
        let case = Case::all().into_iter().find(|case| case.to_string() == text);
        case.ok_or_else(|| format!("no case '{text}'"))
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Where::Threads { "threads" } else { "processes" })
    }
}

/// The cores that this process was allowed to use when it began.
pub(crate) fn cores() -> Result<Vec<usize>> {
    static CORES: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();
    if let Some(cores) = CORES.get() {
        return Ok(cores.clone());
    }
    let cores = machine::cores()?;
    Ok(CORES.get_or_init(|| cores).clone())
}

/// Waits for a child process.
pub(crate) fn reap(child: i32) -> Result<()> {
    let mut status = 0;
    // SAFETY: `status` is ours to write to.
    if unsafe { libc::waitpid(child, &raw mut status, 0) } != child || status != 0 {
        bail!("a child process failed (status {status})");
    }
    Ok(())
}

/// Runs on this core for a while.
fn stay() {
    let begin = Instant::now();
    while begin.elapsed() < STAY {
        std::hint::spin_loop();
    }
}

/// Sleeps until another thread or process writes to the other end.
fn pass(gate: &OwnedFd) -> Result<()> {
    rustix::io::read(gate, &mut [0u8; 1]).context("waiting at the gate")?;
    Ok(())
}
