//! The control plane between threads of one process: a table behind a lock.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::share;
use crate::state::control::{Connect, Control, Liveness, Notice, PeerHealth, Progress, Sharing, Topology, exchange};
use crate::state::numbers::Numbers;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::backoff::SLICE;
use tinynccl_sys::config::Config;
use tinynccl_sys::interrupt::asked_to_stop;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::lock;
use tinynccl_transport::bootstrap::{Disagreement, first_difference};
use tinynccl_transport::mapping::Mapping;
use tinynccl_transport::{Doorbell, LinkOptions, LinkPair, inproc};

type Listener = Box<dyn Fn(&Notice) + Send + Sync>;

/// Wraps every pair of links: our rank, the peer, the pair.
pub(super) type Wrap = Box<dyn Fn(usize, usize, LinkPair) -> LinkPair + Send + Sync>;

/// State that the ranks of one process share.
pub(super) struct World {
    size: usize,
    hub: Arc<inproc::Hub>,
    table: Mutex<Table>,
    changed: Condvar,
    config: Config,
    secret: Secret,
    wrap: Option<Wrap>,
}

#[derive(Default)]
struct Table {
    exchanges: HashMap<String, HashMap<usize, Vec<u8>>>,
    /// Number of members that have read an exchange's values.
    taken: HashMap<String, usize>,
    /// Memory on its way from the first rank to the others.
    shared: HashMap<String, Arc<Mapping>>,
    progress: HashMap<(u32, usize), Tracked>,
    left: Vec<bool>,
    /// With the rank and the communicator that each is of.
    listeners: Vec<((usize, u32), Arc<Listener>)>,
    aborts: Vec<(usize, Notice)>,
}

/// A rank's progress on a communicator. It stays until all members are done: those that close later look at it.
struct Tracked {
    progress: Arc<Progress>,
    forgotten: bool,
}

/// One thread's rank.
pub(super) struct Local {
    rank: usize,
    world: Arc<World>,
    numbers: Numbers,
}

impl Local {
    /// The ranks of a world of `size` threads.
    pub(super) fn world(size: usize, config: &Config, wrap: Option<Wrap>) -> Result<Vec<Local>> {
        let world = Arc::new(World {
            size,
            hub: inproc::Hub::new(),
            table: Mutex::new(Table { left: vec![false; size], ..Table::default() }),
            changed: Condvar::new(),
            config: config.clone(),
            secret: Secret::random()?,
            wrap,
        });
        Ok((0..size).map(|rank| Local { rank, world: world.clone(), numbers: Numbers::new(rank, size) }).collect())
    }
}

impl Topology for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn job(&self) -> u64 {
        self.world.secret.name()
    }

    fn world_size(&self) -> usize {
        self.world.size
    }
}

impl Sharing for Local {
    fn offer(&self, key: &str, _members: &[usize], value: Vec<u8>) -> Result<()> {
        lock(&self.world.table).exchanges.entry(key.to_owned()).or_default().insert(self.rank, value);
        self.world.changed.notify_all();
        Ok(())
    }

    fn collect(&self, key: &str, members: &[usize], ended: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>> {
        let (timeout, started) = (self.world.config.timeout, Instant::now());
        let mut table = lock(&self.world.table);
        loop {
            let values = table.exchanges.entry(key.to_owned()).or_default();
            let missing: Vec<usize> = members.iter().copied().filter(|m| !values.contains_key(m)).collect();
            if missing.is_empty() {
                let all = members.iter().map(|m| values[m].clone()).collect();
                let taken = table.taken.entry(key.to_owned()).or_default();
                *taken += 1;
                if *taken == members.len() {
                    table.taken.remove(key);
                    table.exchanges.remove(key);
                }
                return Ok(all);
            }
            let waited = started.elapsed();
            let gone: Vec<usize> = missing.iter().copied().filter(|&m| table.left[m]).collect();
            if let Some(&peer) = gone.first() {
                return Err(Error::PeerLost {
                    op: format!("exchange '{key}'"),
                    rank: self.rank,
                    peer,
                    address: "thread of this process".to_owned(),
                    detail: "it dropped its communicator".to_owned(),
                });
            }
            if waited >= timeout || asked_to_stop() {
                return Err(Error::Timeout {
                    op: format!("exchange '{key}'"),
                    rank: self.rank,
                    waited,
                    missing,
                    detail: "threads of this process: has each of them made the same call?".to_owned(),
                });
            }
            if ended() {
                return Err(Error::Aborted {
                    op: format!("exchange '{key}'"),
                    rank: self.rank,
                    reason: "the communicator failed while this rank waited".to_owned(),
                });
            }
            // `ended` wakes no one.
            let slice = (timeout - waited).min(SLICE);
            table = self.world.changed.wait_timeout(table, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn share(
        &self,
        key: &str,
        members: &[usize],
        bytes: usize,
        ended: &dyn Fn() -> bool,
    ) -> Result<Option<Arc<Mapping>>> {
        let memory = match members.first() == Some(&self.rank) {
            true => Some(Arc::new(Mapping::anonymous(bytes)?)),
            false => None,
        };
        if let Some(memory) = &memory {
            lock(&self.world.table).shared.insert(key.to_owned(), memory.clone());
        }
        let wishes = exchange(self, key, members, &bytes, ended)?;
        // The first rank puts its memory into the table before it publishes its request.
        let memory = memory.or_else(|| lock(&self.world.table).shared.get(key).cloned());
        exchange(self, &format!("{key}-mapped"), members, &(), ended)?;
        lock(&self.world.table).shared.remove(key);
        share::agree(members, &wishes, self.rank)?;
        Ok(memory)
    }
}

impl Liveness for Local {
    fn track(&self, comm: u32) -> Arc<Progress> {
        let new = || Tracked { progress: Arc::new(Progress::new(&self.world.secret, comm)), forgotten: false };
        lock(&self.world.table).progress.entry((comm, self.rank)).or_insert_with(new).progress.clone()
    }

    fn disagreement(&self, comm: u32, members: &[usize]) -> Option<Disagreement> {
        let of = |rank: usize| Some(lock(&self.world.table).progress.get(&(comm, rank))?.progress.clone());
        let ours = of(self.rank)?.calls();
        members.iter().filter(|&&rank| rank != self.rank).find_map(|&rank| {
            let calls = first_difference(&ours, &of(rank)?.calls())?;
            Some(Disagreement { comm, ranks: [self.rank, rank], calls })
        })
    }

    fn health(&self, comm: u32) -> Result<Vec<PeerHealth>> {
        let table = lock(&self.world.table);
        Ok((0..self.world.size)
            .map(|rank| PeerHealth {
                silent_for: Duration::ZERO,
                progress: table.progress.get(&(comm, rank)).map(|tracked| tracked.progress.snapshot()),
                gone: table.left[rank].then(|| "it dropped its communicator".to_owned()),
            })
            .collect())
    }

    fn has_left(&self, rank: usize) -> bool {
        lock(&self.world.table).left[rank]
    }

    fn abort(&self, comm: u32, reason: &str) {
        let notice = Notice::Abort { from: self.rank, comm, reason: reason.to_owned() };
        let listeners: Vec<Arc<Listener>> = {
            let mut table = lock(&self.world.table);
            table.aborts.push((self.rank, notice.clone()));
            table.listeners.iter().filter(|((r, _), _)| *r != self.rank).map(|(_, l)| l.clone()).collect()
        };
        for listener in listeners {
            listener(&notice);
        }
        self.world.changed.notify_all();
    }

    fn subscribe(&self, comm: u32, listener: Listener) {
        let listener = Arc::new(listener);
        let past: Vec<Notice> = {
            let mut table = lock(&self.world.table);
            table.listeners.push(((self.rank, comm), listener.clone()));
            table.aborts.iter().filter(|(from, _)| *from != self.rank).map(|(_, n)| n.clone()).collect()
        };
        for notice in past {
            listener(&notice);
        }
    }

    fn forget(&self, comm: u32, members: &[usize]) {
        let mut table = lock(&self.world.table);
        table.listeners.retain(|(of, _)| *of != (self.rank, comm));
        if let Some(ours) = table.progress.get_mut(&(comm, self.rank)) {
            ours.forgotten = true;
        }
        if members.iter().all(|&rank| table.progress.get(&(comm, rank)).is_some_and(|tracked| tracked.forgotten)) {
            members.iter().for_each(|&rank| drop(table.progress.remove(&(comm, rank))));
        }
    }
}

impl Connect for Local {
    fn connect(
        &self,
        comm: u32,
        peer: usize,
        channel: u32,
        options: LinkOptions,
        doorbell: &Arc<Doorbell>,
        abort: &dyn Fn() -> Option<Error>,
    ) -> Result<LinkPair> {
        let deadline = self.world.config.connect_timeout.min(self.world.config.timeout);
        let to = inproc::ConnectTo { comm, rank: self.rank, peer_rank: peer, channel, options };
        let or_left = || {
            abort().or_else(|| {
                self.has_left(peer).then(|| Error::PeerLost {
                    op: "connect".to_owned(),
                    rank: self.rank,
                    peer,
                    address: "thread of this process".to_owned(),
                    detail: "it dropped its communicator".to_owned(),
                })
            })
        };
        let pair = self.world.hub.connect(&to, doorbell, &or_left, deadline)?;
        Ok(match &self.world.wrap {
            Some(wrap) => wrap(self.rank, peer, pair),
            None => pair,
        })
    }
}

impl Control for Local {
    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    fn close(&self) {
        // Why this rank leaves, if it has failed: another one passes that on, rank after rank, and may not be done.
        let (listeners, aborts) = {
            let table = lock(&self.world.table);
            (table.listeners.clone(), table.aborts.clone())
        };
        for (from, notice) in &aborts {
            listeners.iter().filter(|((rank, _), _)| rank != from && *rank != self.rank).for_each(|(_, l)| l(notice));
        }
        let mut table = lock(&self.world.table);
        table.left[self.rank] = true;
        table.listeners.retain(|((rank, _), _)| *rank != self.rank);
        let listeners: Vec<Arc<Listener>> = table.listeners.iter().map(|(_, l)| l.clone()).collect();
        drop(table);
        for listener in listeners {
            listener(&Notice::Left);
        }
        self.world.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_leaves_after_an_abort_is_not_missed_before_that_is_known() {
        let ranks: Vec<Arc<Local>> =
            Local::world(3, &Config::default(), None).unwrap().into_iter().map(Arc::new).collect();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (one, two) = (ranks[1].clone(), heard.clone());
        // The first listener leaves before the last one is notified.
        ranks[1].subscribe(0, Box::new(move |_| one.close()));
        ranks[2].subscribe(0, Box::new(move |notice| lock(&two).push(matches!(notice, Notice::Abort { from: 0, .. }))));
        ranks[0].abort(0, "no more");
        assert_eq!(*lock(&heard), [true, false, true], "the abort, that rank 1 has left, the abort again");
    }
}
