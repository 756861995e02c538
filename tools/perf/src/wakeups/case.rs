//! The parameters of a run: fence, threads or processes, time of the registration, and whether the two sides are
//! pinned.

use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use program_kit::machine;

use super::fence::Fence;
use super::race::{Words, link_between_threads, sleeper, waker};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Where {
    Threads,
    Processes,
}

/// Time at which the waker's process registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Registered {
    /// While it has one thread, which has run on the core that the waker is to use.
    Early,
    /// While its waker sleeps on that core.
    Late,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) fence: Fence,
    pub(super) place: Where,
    pub(super) registered: Registered,
    pub(super) pinned: bool,
}

/// Time that a core runs a process before that counts as having run there.
const STAY: Duration = Duration::from_millis(2);

impl Case {
    /// Every meaningful combination.
    pub(super) fn all() -> Vec<Case> {
        let mut all = Vec::new();
        for &fence in Fence::value_variants() {
            for &place in Where::value_variants() {
                for &registered in Registered::value_variants() {
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
    pub(super) fn run(&self, rounds: u64) -> Result<u64> {
        if self.fence == Fence::Link {
            return link_between_threads(self, rounds);
        }
        let shared = Words::shared()?;
        if self.place == Where::Threads {
            return self.waker_here(shared, rounds, |shared| sleeper(shared, self.fence, rounds));
        }
        // SAFETY: this process has one thread, so the child finds nothing half done.
        match unsafe { libc::fork() } {
            -1 => bail!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let outcome = self.waker_here(shared, rounds, |_| Ok(0));
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
                let lost = sleeper(shared, self.fence, rounds);
                reap(child)?;
                lost
            }
        }
    }

    /// The waker as a thread of this process, which registers as the case has it, beside `other` on the calling thread.
    fn waker_here(&self, shared: &Words, rounds: u64, other: impl FnOnce(&Words) -> Result<u64>) -> Result<u64> {
        self.pin_to(1)?;
        stay();
        self.pin_to(0)?;
        if self.registered == Registered::Early {
            self.fence.register()?;
        }
        std::thread::scope(|scope| {
            // An error here drops `open`, and the waker's thread ends.
            let (open, gate) = channel();
            let thread = scope.spawn(move || {
                self.pin_to(1)?;
                gate.recv().context("waiting at the gate")?;
                waker(shared, self.fence, rounds);
                anyhow::Ok(())
            });
            // The waker sleeps at the gate by now, and its core idles with our memory loaded.
            stay();
            if self.registered == Registered::Late {
                self.fence.register()?;
            }
            open.send(()).context("opening the gate")?;
            let lost = other(shared);
            thread.join().map_err(|_| anyhow::anyhow!("the waker panicked"))??;
            lost
        })
    }

    /// Pins this thread to the first or second core that the process may use, if the case is a pinned one.
    pub(super) fn pin_to(&self, which: usize) -> Result<()> {
        match cores().get(which) {
            _ if !self.pinned => Ok(()),
            Some(&core) => machine::pin(core),
            None => bail!("expected two cores to run on, got {}", cores().len()),
        }
    }
}

/// The cores that this process was allowed to use when it began.
pub(super) fn cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(|| machine::cores().unwrap_or_default())
}

/// Waits for a child process.
pub(super) fn reap(child: i32) -> Result<()> {
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
