//! The ways to order the two sides.

use std::fmt;
use std::sync::atomic::{Ordering, compiler_fence, fence};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use rustix::thread::{MembarrierCommand, membarrier};

/// Orders the store and the load of the waker, and those of the sleeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fence {
    /// Not at all, on the waker's side: the control, which must lose.
    None,
    /// A full fence on both sides.
    Full,
    /// `membarrier(PRIVATE_EXPEDITED)` by the sleeper; between threads.
    Private,
    /// `membarrier(GLOBAL_EXPEDITED)` by the sleeper.
    Global,
    /// `membarrier(GLOBAL_EXPEDITED)` by the sleeper, after each core has run another process since the registration.
    Visited,
    /// The library's own, through a link: full.
    Link,
}

impl Fence {
    pub(crate) fn registers(self) -> bool {
        matches!(self, Fence::Private | Fence::Global | Fence::Visited)
    }

    /// Returns true if losses are known or expected.
    pub(crate) fn may_lose(self) -> bool {
        matches!(self, Fence::None | Fence::Global)
    }

    /// Registers this process with the kernel for the interrupts of `membarrier`.
    pub(crate) fn register(self) -> Result<()> {
        match self {
            Fence::None | Fence::Full | Fence::Link => Ok(()),
            Fence::Private => membarrier(MembarrierCommand::RegisterPrivateExpedited).context("registering"),
            Fence::Global => membarrier(MembarrierCommand::RegisterGlobalExpedited).context("registering"),
            Fence::Visited => {
                membarrier(MembarrierCommand::RegisterGlobalExpedited).context("registering")?;
                visit_all_cores()
            }
        }
    }

    /// The waker's side.
    #[inline(always)]
    pub(crate) fn light(self) {
        match self {
            Fence::Full => fence(Ordering::SeqCst),
            _ => compiler_fence(Ordering::SeqCst),
        }
    }

    /// The sleeper's side.
    #[inline(always)]
    pub(crate) fn heavy(self) -> Result<()> {
        fence(Ordering::SeqCst);
        match self {
            Fence::Private => membarrier(MembarrierCommand::PrivateExpedited)?,
            Fence::Global | Fence::Visited => membarrier(MembarrierCommand::GlobalExpedited)?,
            Fence::None | Fence::Full | Fence::Link => {}
        }
        fence(Ordering::SeqCst);
        Ok(())
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("?", |value| value.get_name()))
    }
}

/// A process of other memory runs on each core that this one may use.
fn visit_all_cores() -> Result<()> {
    for core in crate::case::cores()? {
        // SAFETY: the child makes two system calls and ends, whatever other threads of this process hold.
        match unsafe { libc::fork() } {
            -1 => bail!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let code = i32::from(program_kit::machine::pin(core).is_err());
                // SAFETY: ends the child at once, without what is to happen at the parent's end.
                unsafe { libc::_exit(code) }
            }
            child => crate::case::reap(child)?,
        }
    }
    Ok(())
}
