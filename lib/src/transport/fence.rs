//! The fence between "I sleep" and "there is something for you", cheap on the side that runs often.
//!
//! Sender: store the message, fence, load the waiting flag. Sleeper: store the waiting flag, fence, look for a message.
//! With a full fence on both sides (Dekker) at least one of them sees the other. A full fence costs the sender the time
//! until its store is visible, 50 ns and more between cores, for every message. `membarrier(2)` moves the whole cost to
//! the sleeper: it makes every core that runs a registered process execute a full fence, so that the sender needs none.
//! Measured on two cores of a virtual machine: an exchange of 8 bytes takes 79 instead of 88 ns; `arm` takes 0.6 µs, and
//! about 11 µs when another core has to be interrupted. That comes on top of 15 to 30 µs for being woken.
//! Source: Linux `Documentation/userspace-api`, `membarrier(2)`, command `GLOBAL_EXPEDITED` (Linux 4.16).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use rustix::thread::{MembarrierCommand, membarrier};

use super::sync::{Step, compiler_fence, fence, order};

/// How both ends of a link order their flags; both must use the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// A full fence on both sides.
    Full,
    /// `membarrier` on the sleeper's side, nothing on the other.
    Asymmetric,
}

/// Whether the kernel has this process on its list.
static REGISTERED: OnceLock<bool> = OnceLock::new();

impl Fence {
    /// Registers this process ahead of its first link, and returns at once. The kernel needs no time for a process of one thread; with
    /// more it waits until every core has been elsewhere (`synchronize_rcu`), 10 to 20 ms here, which a thread of ours does meanwhile.
    pub(crate) fn prepare() {
        if REGISTERED.get().is_some() {
            return;
        }
        let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
        if alone {
            Fence::available();
            return;
        }
        let spawned = std::thread::Builder::new().name("tinynccl-fence".to_owned()).spawn(Fence::available);
        if let Err(e) = spawned {
            log::debug!("no thread for membarrier ({e}): the first link registers this process");
        }
    }

    /// What this process can do. The first call registers the process with the kernel.
    pub(crate) fn available() -> Fence {
        let registered = *REGISTERED.get_or_init(|| {
            let result = membarrier(MembarrierCommand::RegisterGlobalExpedited)
                .and_then(|()| membarrier(MembarrierCommand::GlobalExpedited));
            if let Err(e) = result {
                log::debug!("membarrier is not available ({e}): links use a full fence per message");
            }
            result.is_ok()
        });
        if registered { Fence::Asymmetric } else { Fence::Full }
    }

    /// What two processes can do together.
    pub(crate) fn common(self, other: Fence) -> Fence {
        if self == Fence::Asymmetric && other == Fence::Asymmetric { Fence::Asymmetric } else { Fence::Full }
    }

    /// The side that runs for every message.
    #[inline(always)]
    pub(crate) fn light(self) {
        match self {
            Fence::Asymmetric => compiler_fence(order(Step::LightFence, Ordering::SeqCst)),
            Fence::Full => fence(order(Step::LightFence, Ordering::SeqCst)),
        }
    }

    /// The side that is about to sleep.
    pub(crate) fn heavy(self) {
        fence(order(Step::HeavyFence, Ordering::SeqCst));
        // The model has no use for the system call: see `sync`.
        if self == Fence::Asymmetric && !cfg!(loom) {
            // It worked when we registered; the man page has it that it goes on working.
            if let Err(e) = membarrier(MembarrierCommand::GlobalExpedited) {
                log::error!("membarrier failed after it had worked: {e}; a wake-up may be late");
            }
        }
        fence(order(Step::HeavyFence, Ordering::SeqCst));
    }
}
