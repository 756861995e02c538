//! The control plane of a communicator: ranks connect, exchange small values, and learn of each other's end.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::transport::mapping::Mapping;
use crate::transport::relay::{Path, Traffic};
use crate::transport::{Doorbell, LinkOptions, LinkPair, Registration};

/// A rank's published progress, read by others when a call hangs.
pub use crate::bootstrap::Progress;
use crate::bootstrap::{Disagreement, Snapshot};

/// State of a rank as its peers see it.
#[derive(Debug, Clone)]
pub(crate) struct PeerHealth {
    /// Last sign of life.
    pub(crate) silent_for: Duration,
    /// Progress on the communicator in question; `None` if the rank does not have it (yet).
    pub(crate) progress: Option<Snapshot>,
    /// Gone, in words.
    pub(crate) gone: Option<String>,
}

/// An event of another rank.
#[derive(Debug, Clone)]
pub(crate) enum Notice {
    /// World rank `rank` died.
    Lost { rank: usize, detail: String },
    /// A rank has said goodbye ([`Control::has_left`]). Only ranks that still wait for it fail: their links report it.
    Left,
    /// World rank `rank` aborted communicator `comm`.
    Abort { from: usize, comm: u32, reason: String },
    /// Two ranks made different calls.
    Disagree(Disagreement),
    /// The rendezvous store is gone.
    StoreLost { detail: String },
}

/// One rank's access to its control plane; shared by the communicators split from one another. Ranks are world ranks.
pub(crate) trait Control: Send + Sync {
    /// Our world rank.
    fn rank(&self) -> usize;
    /// Opens the links with `peer`; both sides call it.
    fn connect(
        &self,
        comm: u32,
        peer: usize,
        channel: u32,
        options: LinkOptions,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
    ) -> Result<LinkPair>;
    /// True when a link with `peer` would be shared memory.
    fn shares_memory(&self, peer: usize) -> bool;
    /// True when `peer` (or we ourselves) runs on this machine.
    fn shares_host(&self, peer: usize) -> bool;
    /// True when the two ranks run on one machine.
    fn same_host(&self, a: usize, b: usize) -> bool;
    /// Name of the machine that `peer` runs on, for people and for keys.
    fn hostname(&self, peer: usize) -> String;
    /// A small all-gather among `members`; `key` must be new.
    fn exchange(&self, key: &str, members: &[usize], value: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.offer(key, members, value)?;
        self.collect(key, members, &|| false)
    }
    /// The first half of [`Control::exchange`], which does not wait.
    fn offer(&self, key: &str, members: &[usize], value: Vec<u8>) -> Result<()>;
    /// The second half; gives [`Error::Aborted`] soon after `ended` has become true.
    fn collect(&self, key: &str, members: &[usize], ended: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>>;
    /// `bytes` of zeroed memory that all `members`, ranks of this host, map; every one of them calls it, `key` must be
    /// new. `None`, on all of them, where the system refuses.
    fn share(&self, key: &str, members: &[usize], bytes: usize) -> Result<Option<Arc<Mapping>>>;
    /// Registers memory with the devices that carry the links; `None` without such devices.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    unsafe fn register(&self, _base: NonNull<u8>, _bytes: usize) -> Result<Option<Registration>> {
        Ok(None)
    }
    /// Bytes from which messages on ordinary pages use zero copy in shared memory.
    fn zero_copy_from(&self, _bytes: usize) {}
    /// Where to publish progress on `comm`, whose first member is `first`.
    fn track(&self, comm: u32, first: usize) -> Arc<Progress>;
    /// Makes our progress known to the others now, where that takes a message.
    fn tell_progress(&self) {}
    /// Compares our calls on `comm` with those of the other `members` if they are in this process. Otherwise the store
    /// compares them and sends a [`Notice`].
    fn disagreement(&self, _comm: u32, _members: &[usize]) -> Option<Disagreement> {
        None
    }
    /// The state of every rank of the world, or an error naming the rank that does not answer.
    fn health(&self, comm: u32) -> Result<Vec<PeerHealth>>;
    /// The rank whose process hosts the rendezvous store, if one does.
    fn store_host(&self) -> Option<usize>;
    /// True when the ranks are threads of one process.
    fn one_process(&self) -> bool;
    /// True when `rank` has said goodbye: a wait for it cannot succeed.
    fn has_left(&self, rank: usize) -> bool;
    /// Tells all others that `comm` has failed.
    fn abort(&self, comm: u32, reason: &str);
    /// Calls `listener` for every notice, past ones included.
    fn subscribe(&self, listener: Box<dyn Fn(&Notice) + Send + Sync>);
    /// How long a rank may be silent before it counts as stopped.
    fn silence_limit(&self) -> Duration;
    /// The pairs of ranks of the world that only reach each other through others.
    fn paths(&self) -> Vec<Path> {
        Vec::new()
    }
    /// Messages that this rank has relayed between others.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    /// Next unused communicator id as far as this process knows.
    fn ids(&self) -> &AtomicU32;
    /// Leaves; no further calls. A rank that relays between others stays until no pair needs it.
    fn close(&self);
}

/// Raises the id counter to at least `next`.
pub(crate) fn raise_ids(control: &dyn Control, next: u32) {
    control.ids().fetch_max(next, Ordering::Relaxed);
}
