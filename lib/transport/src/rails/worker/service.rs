//! Interface between a worker and what it serves.

use std::os::fd::BorrowedFd;
use std::time::Instant;

/// Work that is left after a descriptor was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) enum Remaining {
    /// Nothing to do before the next event or the next job.
    Nothing,
    /// More, after other descriptors had their time slice.
    More,
    /// Reading is tried again at this time, if no job does it before.
    Held(Instant),
    /// Nothing will be read any more; the worker drops the service if its owner has closed it.
    Ended,
    /// The descriptor is not to be watched any more.
    Unwatch,
}

/// A descriptor that a worker watches, and what is done when it is ready.
pub(in crate::rails) trait Service: Send {
    /// The descriptor; `None` once it is closed.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Reads what is there. `hung_up`: the peer is known to have closed.
    fn readable(&self, hung_up: bool) -> Remaining;

    /// Writes what is to be sent. `ready`: the descriptor takes more again.
    fn writable(&self, _ready: bool) -> Remaining {
        Remaining::Nothing
    }

    /// Fails what is served, for the reason `detail`: it cannot be watched, or the worker ends before it was closed.
    fn fail(&self, detail: &str);
}
