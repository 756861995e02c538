//! The ways to order the two sides.

use std::sync::atomic::{Ordering, compiler_fence, fence};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use rustix::thread::{MembarrierCommand, membarrier};

/// Orders the store and the load of the waker, and those of the sleeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Fence {
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
    pub(super) fn registers(self) -> bool {
        matches!(self, Fence::Private | Fence::Global | Fence::Visited)
    }

    /// Returns true if losses are known or expected.
    pub(super) fn may_lose(self) -> bool {
        matches!(self, Fence::None | Fence::Global)
    }

    /// Registers this process with the kernel for the interrupts of `membarrier`.
    pub(super) fn register(self) -> Result<()> {
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
    pub(super) fn light(self) {
        match self {
            Fence::Full => fence(Ordering::SeqCst),
            _ => compiler_fence(Ordering::SeqCst),
        }
    }

    /// The sleeper's side.
    #[inline(always)]
    pub(super) fn heavy(self) -> Result<()> {
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

/// A process of other memory runs on each core that this one may use.
fn visit_all_cores() -> Result<()> {
    for &core in super::case::cores() {
        // SAFETY: the child makes two system calls and ends, whatever other threads of this process hold.
        match unsafe { libc::fork() } {
            -1 => bail!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let code = i32::from(program_kit::machine::pin(core).is_err());
                // SAFETY: ends the child at once, without what is to happen at the parent's end.
                unsafe { libc::_exit(code) }
            }
            child => super::case::reap(child)?,
        }
    }
    Ok(())
}
