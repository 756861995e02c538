//! Closing a link without losing what was sent on it.
//!
//! Destroying a queue pair drops what the peer has not acknowledged. So the last half that goes hands the link over to
//! the endpoint's thread, which waits until the goodbye, the last write, is acknowledged: for [`LINGER`] at most, and
//! in any case no longer than the device repeats it. When the endpoint is gone the queue pair goes at once.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::link::Core;
use crate::linger::{Closing, Linger};
use tinynccl_sys::threads::lock;

/// Longest time that a dropped link's queue pair is kept.
const LINGER: Duration = Duration::from_secs(10);

/// A link without halves.
#[derive(Debug)]
struct Ending {
    core: Arc<Mutex<Core>>,
    /// A duplicate of the core's.
    poller: OwnedFd,
    until: Instant,
}

impl Closing for Ending {
    fn fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn is_done(&mut self) -> bool {
        let mut core = lock(&self.core);
        let over = core.is_over();
        if !over && Instant::now() >= self.until {
            log::warn!(
                "rank {}: the RDMA link with rank {} is given up with {} unacknowledged writes",
                core.peer.rank,
                core.peer.peer,
                core.in_flight()
            );
            return true;
        }
        over
    }

    fn needs_this_process(&self) -> bool {
        true
    }
}

/// A half is gone; the last one lets the link end.
pub(super) fn leave(core: &Arc<Mutex<Core>>, linger: &Linger) {
    if !linger.origin.is_here() {
        // The queue pairs, and the memory of their queues, are its parent's.
        return std::mem::forget(core.clone());
    }
    let poller = {
        let mut this = lock(core);
        this.halves = this.halves.saturating_sub(1);
        if this.halves > 0 || this.is_over() {
            return;
        }
        this.poller().try_clone()
    };
    match poller {
        Ok(poller) => linger.take(Box::new(Ending { core: core.clone(), poller, until: Instant::now() + LINGER })),
        Err(e) => log::warn!("an RDMA link is closed at once: {e}"),
    }
}
