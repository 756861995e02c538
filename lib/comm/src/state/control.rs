//! The control plane of a communicator: ranks connect, exchange small values, and learn of each other's end.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::numbers::Numbers;
use crate::membership::Membership;
use tinynccl_plan::error::{Error, Result};
use tinynccl_transport::mapping::Mapping;
use tinynccl_transport::relay::{Path, Traffic};
use tinynccl_transport::{Doorbell, LinkOptions, LinkPair, Registration};

/// A rank's published progress, read by others when a call hangs.
pub use tinynccl_transport::bootstrap::Progress;
use tinynccl_transport::bootstrap::{Disagreement, Snapshot};

/// State of a rank as its peers see it.
#[derive(Debug, Clone)]
pub(crate) struct PeerHealth {
    /// Last sign of life.
    pub(crate) silent_for: Duration,
    /// Progress on the communicator in question; `None` if the rank does not have it (yet).
    pub(crate) progress: Option<Snapshot>,
    /// Cause of the rank's end as text; `None` if it is not gone.
    pub(crate) gone: Option<String>,
}

/// An event of another rank.
#[derive(Debug, Clone)]
pub(crate) enum Notice {
    /// World rank `rank` died.
    Lost { rank: usize, detail: String },
    /// A rank has left in order ([`Liveness::has_left`]). Only ranks that still wait for it fail: their links report
    /// it.
    Left,
    /// World rank `rank` aborted communicator `comm`.
    Abort { from: usize, comm: u32, reason: String },
    /// Two ranks made different calls.
    Disagree(Disagreement),
    /// The rendezvous store is gone.
    StoreLost { detail: String },
}

/// One rank's access to its control plane; shared by the communicators split from one another. Ranks are world ranks.
pub(crate) trait Control: Topology + Sharing + Liveness + Connect + Send + Sync {
    /// The numbers of communicators that this rank gives out and knows.
    fn numbers(&self) -> &Numbers;
    /// Agreement of the ranks without a store; `None` for threads of one process.
    fn membership(&self) -> Option<&Arc<Membership>> {
        None
    }
    /// Leaves; no further calls. A rank that relays between others stays until no pair needs it.
    fn close(&self);
}

/// Location of the ranks. The defaults are those of threads of one process.
pub(crate) trait Topology {
    /// Our world rank.
    fn rank(&self) -> usize;
    /// Number that this start of the job has, and no other: the same on all ranks, random, and no secret.
    fn job(&self) -> u64;
    /// Number of ranks of the world.
    fn world_size(&self) -> usize;
    /// Process that runs `peer`.
    fn process(&self, _peer: usize) -> u32 {
        std::process::id()
    }
    /// Address of `peer`'s host on a network, if it listens there.
    fn address(&self, _peer: usize) -> Option<IpAddr> {
        None
    }
    /// The loss of `peer` in words, if this process knows of it.
    fn loss(&self, _peer: usize) -> Option<String> {
        None
    }
    /// True once that process has ended, where this one can prove it.
    fn has_ended(&self, _peer: usize) -> bool {
        false
    }
    /// True when the ranks are threads of one process.
    fn one_process(&self) -> bool {
        true
    }
    /// True when a link with `peer` would be shared memory.
    fn shares_memory(&self, _peer: usize) -> bool {
        true
    }
    /// True when the two ranks run on one machine.
    fn same_host(&self, _a: usize, _b: usize) -> bool {
        true
    }
    /// True when `peer` (or we ourselves) runs on this machine.
    fn shares_host(&self, peer: usize) -> bool {
        self.same_host(self.rank(), peer)
    }
    /// Name of the machine that `peer` runs on, for people and for keys.
    fn hostname(&self, _peer: usize) -> String {
        "this process".to_owned()
    }
    /// The rank whose process hosts the rendezvous store, if one does.
    fn store_host(&self) -> Option<usize> {
        None
    }
    /// The pairs of ranks of the world that only reach each other through others.
    fn paths(&self) -> Vec<Path> {
        Vec::new()
    }
    /// Messages that this rank has relayed between others.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

/// Exchange of small values, and of memory that all map.
pub(crate) trait Sharing {
    /// The first half of a small all-gather among `members`, which does not wait; `key` must be new.
    fn offer(&self, key: &str, members: &[usize], value: Vec<u8>) -> Result<()>;
    /// The second half; gives [`Error::Aborted`] soon after `ended` has become true.
    fn collect(&self, key: &str, members: &[usize], ended: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>>;
    /// `bytes` of zeroed memory that all `members`, ranks of this host, map; every one of them calls it, `key` must be
    /// new. `None`, on all of them, where the system refuses; `ended` as in [`Sharing::collect`].
    fn share(
        &self,
        key: &str,
        members: &[usize],
        bytes: usize,
        ended: &dyn Fn() -> bool,
    ) -> Result<Option<Arc<Mapping>>>;
}

/// Progress, failures and ends of the ranks.
pub(crate) trait Liveness {
    /// Returns the place to publish progress on `comm`.
    fn track(&self, comm: u32) -> Arc<Progress>;
    /// Makes our progress known to the others now, where that takes a message.
    fn tell_progress(&self) {}
    /// Compares our calls on `comm` with those of the other `members` if they are in this process. Otherwise the store
    /// compares them and sends a [`Notice`].
    fn disagreement(&self, _comm: u32, _members: &[usize]) -> Option<Disagreement> {
        None
    }
    /// The state of every rank of the world, or an error naming the rank that does not answer.
    fn health(&self, comm: u32) -> Result<Vec<PeerHealth>>;
    /// True when `rank` has left in order: a wait for it cannot succeed.
    fn has_left(&self, rank: usize) -> bool;
    /// Longest silence of a rank before it counts as stopped.
    fn silence_limit(&self) -> Duration {
        Duration::MAX
    }
    /// Notifies all others that `comm` has failed.
    fn abort(&self, comm: u32, reason: &str);
    /// Calls `listener` for every notice, past ones included, until `comm` is forgotten.
    fn subscribe(&self, comm: u32, listener: Box<dyn Fn(&Notice) + Send + Sync>);
    /// Ends our use of `comm`, which has these members.
    fn forget(&self, comm: u32, members: &[usize]);
}

/// Links, and the devices that carry them.
pub(crate) trait Connect {
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
    /// Registers memory with the devices that carry the links; `None` without such devices.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    unsafe fn register(&self, _base: NonNull<u8>, _bytes: usize) -> Result<Option<Registration>> {
        Ok(None)
    }
    /// Bytes from which messages on ordinary pages use zero copy in shared memory.
    fn zero_copy_from(&self, _bytes: usize) {}
}

/// A small all-gather of values among `members`; `key` must be new, `ended` is that of [`Sharing::collect`].
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    control: &dyn Control,
    key: &str,
    members: &[usize],
    value: &T,
    ended: &dyn Fn() -> bool,
) -> Result<Vec<T>> {
    control.offer(key, members, encode(key, value)?)?;
    control.collect(key, members, ended)?.iter().map(|bytes| decode(key, bytes)).collect()
}

/// A value as ranks exchange it.
pub(crate) fn encode<T: Serialize>(key: &str, value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::invalid(key, e.to_string()))
}

/// Another rank's value.
pub(crate) fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    let failed = |e| Error::invalid(key, format!("does not parse ({e}): do all ranks run the same version?"));
    serde_json::from_slice(bytes).map_err(failed)
}
