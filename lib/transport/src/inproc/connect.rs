//! Rendezvous of the threads of one process, and the link that they make there.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::memory::mapping::Mapping;
use crate::shm::{self, Ends, Layout, SingleCopy};
use crate::wait::Wait;
use crate::{LinkOptions, LinkPair, Peer};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::threads::lock;

/// Rendezvous of the threads of one process. Shared by all of them in an `Arc`.
#[derive(Debug, Default)]
pub struct Hub {
    waiting: Mutex<Vec<Entry>>,
    changed: Condvar,
}

/// A link to be made: the communicator, both ranks, the channel and the options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectTo {
    /// Communicator id.
    pub comm: u32,
    /// Our rank in the world.
    pub rank: usize,
    /// The peer's rank in the world.
    pub peer_rank: usize,
    /// Channel: several links between the same two ranks differ in it.
    pub channel: u32,
    /// Equal at both ends.
    pub options: LinkOptions,
}

/// The end that came first.
#[derive(Debug)]
struct Entry {
    to: ConnectTo,
    bell: Arc<Doorbell>,
    result: Option<Result<LinkPair>>,
}

impl Hub {
    /// An empty hub.
    pub fn new() -> Arc<Hub> {
        Arc::new(Hub::default())
    }

    /// One end of a link; waits until the peer's thread calls this for the other end.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `deadline`, whatever `abort` returns, [`Error::InvalidArgument`] at both ends when
    /// their options differ.
    pub fn connect(
        &self,
        to: &ConnectTo,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
        deadline: Duration,
    ) -> Result<LinkPair> {
        if to.rank == to.peer_rank {
            return Err(Error::invalid("connect", format!("rank {} asked for a link with itself", to.rank)));
        }
        let wait = Wait::new(to.rank, to.peer_rank, deadline, abort);
        let mut waiting = lock(&self.waiting);
        if let Some(entry) = waiting.iter_mut().find(|e| e.result.is_none() && e.meets(to)) {
            let (ours, theirs) = match link(entry, to, doorbell) {
                Ok((ours, theirs)) => (Ok(ours), Ok(theirs)),
                Err(e) => (Err(e.clone()), Err(e)),
            };
            entry.result = Some(theirs);
            self.changed.notify_all();
            return ours;
        }
        let entry = Entry { to: *to, bell: doorbell.clone(), result: None };
        if waiting.iter().any(|e| e.to == *to) {
            return Err(Error::invalid("connect", format!("two threads asked for the same end of {to:?}")));
        }
        waiting.push(entry);
        loop {
            let slice = wait.slice(|| format!("its thread has not asked for comm {}, channel {}", to.comm, to.channel));
            let Some(mine) = waiting.iter().position(|e| e.to == *to) else { return Err(vanished()) };
            let done = waiting.get(mine).is_some_and(|e| e.result.is_some());
            match slice {
                Ok(slice) if !done => {
                    waiting = self.changed.wait_timeout(waiting, slice).unwrap_or_else(PoisonError::into_inner).0;
                }
                // The link, or the end of the wait without one.
                slice => {
                    let failed = || Err(slice.err().unwrap_or_else(vanished));
                    return waiting.swap_remove(mine).result.unwrap_or_else(failed);
                }
            }
        }
    }
}

fn vanished() -> Error {
    Error::invalid("connect", "an entry of the hub vanished; this is a bug of the library")
}

impl Entry {
    fn meets(&self, to: &ConnectTo) -> bool {
        let key = |t: &ConnectTo| (t.comm, t.channel);
        key(&self.to) == key(to) && self.to.rank == to.peer_rank && self.to.peer_rank == to.rank
    }
}

/// Both pairs: of the end that came second and of the one that came first.
fn link(first: &Entry, second: &ConnectTo, second_bell: &Arc<Doorbell>) -> Result<(LinkPair, LinkPair)> {
    if first.to.options != second.options {
        let (a, b) = (first.to, second);
        let detail = format!(
            "ranks {} and {} disagree on the link: {:?} and {:?}; give all ranks the same configuration",
            a.rank, b.rank, a.options, b.options
        );
        return Err(Error::invalid("connect", detail));
    }
    let layout = Layout::new(&second.options)?;
    let memory = Arc::new(Mapping::anonymous(layout.bytes())?);
    let end = |to: &ConnectTo, bell: &Arc<Doorbell>| Ends {
        peer: Peer { rank: to.rank, peer: to.peer_rank, address: format!("thread of process {}", std::process::id()) },
        bell: bell.clone(),
        lifeline: None,
        single_copy: SingleCopy::off(),
    };
    Ok((
        shm::pair(&memory, layout, 0, end(second, &first.bell), "inproc")?,
        shm::pair(&memory, layout, 1, end(&first.to, second_bell), "inproc")?,
    ))
}
