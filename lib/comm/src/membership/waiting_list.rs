//! Newcomers that wait to become ranks, as one member sees them, and what comes of the attempts to take them in.
//!
//! ```text
//!   newcomer                                  a member
//!   waiting                               ─▶
//!                                         ◀─  the addresses of all ranks                        until it comes again,
//!                                         ◀─  start: store, rank, size    (the group has agreed)    once a heartbeat
//!   started: is it used?             ─▶
//!                                         ◀─  sealed, or void: wait on    (the group has agreed)
//! ```
//! A newcomer keeps one connection, whose end shows its death. Every member knows the attempts, so that a newcomer
//! whose member dies hears the rest from another one. The list belongs to a process and outlives its communicators: the
//! addresses in a ticket stay good.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::agreement::MOST_NEWCOMERS;
use tinynccl_plan::error::Result;
use tinynccl_sys::config::Config;
use tinynccl_sys::secret::Secret;
use tinynccl_sys::threads::lock;
use tinynccl_transport::{Endpoint, Newcomer};

/// Attempts that are remembered: a newcomer asks at once what came of its own.
const KEPT: usize = 8;
/// Times that a newcomer may fail to come before it counts as gone.
const MISSED: u32 = 4;
/// Most addresses that newcomers are told.
const MOST_ADDRESSES: usize = 64;

/// A newcomer's message when it comes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) stage: Stage,
    /// Time after which it comes again, unless it is starting.
    pub(crate) again: Duration,
}

/// Progress of a newcomer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stage {
    Waiting,
    /// Has its communicator of this attempt, and does not know whether the others use it.
    Started(u64),
    /// Has no communicator of this attempt, and waits.
    Failed(u64),
}

/// A member's message.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Addresses at which newcomers are let in now.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) news: Option<News>,
}

/// Decision of the group.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum News {
    /// Start as `rank` of `size` at the store of this id ([`UniqueId`](tinynccl_transport::bootstrap::UniqueId)).
    Start { attempt: u64, store: String, rank: usize, size: usize },
    /// All use the communicator.
    Sealed,
    /// Nobody does.
    Void,
}

/// One attempt of the group to start with newcomers.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// Random.
    pub(crate) number: u64,
    pub(crate) store: String,
    /// Ranks before those of the newcomers.
    pub(crate) members: usize,
    pub(crate) newcomers: Vec<u64>,
}

impl Attempt {
    fn start(&self, newcomer: u64) -> Option<News> {
        let place = self.newcomers.iter().position(|&other| other == newcomer)?;
        let (rank, size) = (self.members + place, self.members + self.newcomers.len());
        Some(News::Start { attempt: self.number, store: self.store.clone(), rank, size })
    }
}

/// An attempt, and what came of it.
struct Progress {
    attempt: Attempt,
    /// Newcomers that could not start.
    failed: BTreeSet<u64>,
    sealed: Option<bool>,
}

impl Progress {
    /// True while the newcomer belongs to the attempt, or to the group that came of it.
    fn has(&self, newcomer: u64) -> bool {
        self.sealed != Some(false) && !self.failed.contains(&newcomer) && self.attempt.newcomers.contains(&newcomer)
    }
}

/// A newcomer that is here.
struct Waiting {
    conn: Newcomer,
    /// Time at which it counts as gone.
    until: Instant,
    stage: Stage,
}

#[derive(Default)]
struct Entries {
    addresses: Vec<SocketAddr>,
    waiting: BTreeMap<u64, Waiting>,
    attempts: VecDeque<Progress>,
    /// Attempts that a member has given up.
    given_up: VecDeque<u64>,
}

/// The newcomers that wait at one process.
pub(crate) struct WaitingList {
    /// Secret of the group's tickets, before the setting is mixed in.
    secret: Secret,
    entries: Mutex<Entries>,
}

impl WaitingList {
    /// Lets newcomers in at `endpoint` that know `secret`.
    pub(super) fn open(endpoint: &Endpoint, secret: Secret, config: &Config) -> Result<Arc<WaitingList>> {
        let list = Arc::new(WaitingList { secret, entries: Mutex::default() });
        let here = list.clone();
        endpoint.admit_newcomers(
            &secret,
            config,
            Box::new(move |newcomer, request, conn| here.take(newcomer, request, conn)),
        )?;
        Ok(list)
    }

    /// The secret and the addresses of a ticket.
    pub(crate) fn ticket(&self) -> (Secret, Vec<SocketAddr>) {
        (self.secret, lock(&self.entries).addresses.clone())
    }

    /// Sets where the members let newcomers in: each one's addresses, the most useful first.
    pub(crate) fn set_addresses(&self, members: &[Vec<SocketAddr>]) {
        let longest = members.iter().map(Vec::len).max().unwrap_or(0);
        // If there are too many, each member's first ones count.
        let addresses = (0..longest).flat_map(|i| members.iter().filter_map(move |member| member.get(i)));
        lock(&self.entries).addresses = addresses.copied().take(MOST_ADDRESSES).collect();
    }

    /// The newcomers that wait here and show that they live.
    pub(crate) fn waiting(&self) -> Vec<u64> {
        let mut entries = lock(&self.entries);
        entries.prune();
        let waiting = entries.waiting.keys().copied();
        waiting.filter(|&newcomer| !entries.is_starting(newcomer)).take(MOST_NEWCOMERS).collect()
    }

    /// Begins an attempt: its newcomers hear that they are to start. Those that waited here when this rank named them
    /// (`named`) and are gone count as lost: no other rank knows them.
    pub(crate) fn begin(&self, attempt: Attempt, named: &[u64]) {
        let mut entries = lock(&self.entries);
        let ours = attempt.newcomers.iter().copied().filter(|newcomer| named.contains(newcomer));
        let failed = ours.filter(|newcomer| !entries.waiting.contains_key(newcomer)).collect();
        let open: Vec<u64> = entries.attempts.iter().filter(|p| p.sealed.is_none()).map(|p| p.attempt.number).collect();
        open.into_iter().for_each(|number| entries.conclude(number, false));
        for &newcomer in &attempt.newcomers {
            entries.send(newcomer, attempt.start(newcomer));
        }
        if entries.attempts.len() == KEPT {
            entries.attempts.pop_front();
        }
        entries.attempts.push_back(Progress { attempt, failed, sealed: None });
    }

    /// Another member has given an attempt up, which may not have begun here.
    pub(super) fn give_up(&self, number: u64) {
        let mut entries = lock(&self.entries);
        if entries.given_up.len() == KEPT {
            entries.given_up.pop_front();
        }
        entries.given_up.push_back(number);
    }

    /// True once an attempt cannot succeed: another member has given it up, or a newcomer is lost.
    pub(crate) fn is_void(&self, number: u64) -> bool {
        let given_up = lock(&self.entries).given_up.contains(&number);
        given_up || !self.lost(number).is_empty()
    }

    /// The newcomers of an attempt that are known to be gone, or to have failed.
    pub(crate) fn lost(&self, number: u64) -> Vec<u64> {
        let entries = lock(&self.entries);
        let Some(progress) = entries.attempts.iter().find(|progress| progress.attempt.number == number) else {
            return Vec::new();
        };
        let gone = |newcomer: &u64| entries.waiting.get(newcomer).is_some_and(|one| one.conn.is_gone());
        let all = progress.attempt.newcomers.iter().copied();
        all.filter(|newcomer| progress.failed.contains(newcomer) || gone(newcomer)).collect()
    }

    /// Ends an attempt: its newcomers hear whether the group uses the communicator.
    pub(crate) fn conclude(&self, number: u64, sealed: bool) {
        lock(&self.entries).conclude(number, sealed);
    }

    /// A newcomer has come. Runs in the acceptor's thread.
    fn take(&self, newcomer: u64, request: &[u8], conn: Newcomer) {
        let Request { stage, again } = match serde_json::from_slice(request) {
            Ok(request) => request,
            Err(e) => return log::warn!("a newcomer at {} speaks another version: {e}", conn.address()),
        };
        let mut entries = lock(&self.entries);
        // A program that never asks who waits keeps no connection of one that is gone.
        entries.prune();
        let number = match stage {
            Stage::Waiting => None,
            Stage::Started(number) | Stage::Failed(number) => Some(number),
        };
        let own = entries.attempts.iter_mut().find(|progress| Some(progress.attempt.number) == number);
        let news = if let Stage::Started(_) = stage {
            match own.map(|progress| progress.sealed) {
                Some(None) => None,
                Some(Some(true)) => Some(News::Sealed),
                // An attempt that we do not know is over for long.
                Some(Some(false)) | None => Some(News::Void),
            }
        } else {
            own.map(|progress| progress.failed.insert(newcomer));
            let open =
                entries.attempts.iter().rev().find(|progress| progress.sealed.is_none() && progress.has(newcomer));
            open.and_then(|progress| progress.attempt.start(newcomer))
        };
        let over = matches!(news, Some(News::Sealed));
        let until = Instant::now() + again.saturating_mul(MISSED).min(Duration::from_secs(3600));
        // The old connection goes only now: the newcomer is never without one.
        entries.waiting.insert(newcomer, Waiting { conn, until, stage });
        entries.send(newcomer, news);
        if over {
            entries.waiting.remove(&newcomer);
        }
    }
}

impl Entries {
    /// True while a newcomer belongs to an attempt, or to the group that came of it.
    fn is_starting(&self, newcomer: u64) -> bool {
        self.attempts.iter().any(|progress| progress.has(newcomer))
    }

    /// Removes the newcomers that are gone. One that starts has no time to come; if it is gone, its attempt has yet to
    /// notice.
    fn prune(&mut self) {
        let (attempts, now) = (&self.attempts, Instant::now());
        self.waiting.retain(|&newcomer, one| {
            let mut own = attempts.iter().filter(|progress| progress.has(newcomer)).peekable();
            let starting = own.peek().is_some();
            own.any(|progress| progress.sealed.is_none()) || !one.conn.is_gone() && (starting || now < one.until)
        });
    }

    fn conclude(&mut self, number: u64, sealed: bool) {
        let Some(progress) = self.attempts.iter_mut().find(|progress| progress.attempt.number == number) else {
            return;
        };
        progress.sealed = Some(sealed);
        let newcomers = progress.attempt.newcomers.clone();
        for newcomer in newcomers {
            let started = self.waiting.get(&newcomer).is_some_and(|one| one.stage == Stage::Started(number));
            match sealed {
                // One that has not started to the end asks when it has.
                true if !started => {}
                true => {
                    self.send(newcomer, Some(News::Sealed));
                    self.waiting.remove(&newcomer);
                }
                false => self.send(newcomer, Some(News::Void)),
            }
        }
    }

    fn send(&mut self, newcomer: u64, news: Option<News>) {
        if let Err(e) = self.try_send(newcomer, news) {
            log::debug!("a newcomer went away: {e}");
        }
    }

    fn try_send(&mut self, newcomer: u64, news: Option<News>) -> Result<(), String> {
        let Some(one) = self.waiting.get_mut(&newcomer) else { return Ok(()) };
        let answer = Answer { addresses: self.addresses.clone(), news };
        one.conn.send(&serde_json::to_vec(&answer).map_err(|e| e.to_string())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_sys::config::TransportChoice;
    use tinynccl_transport::{JoinDialer, MemberConn};

    const LIMIT: Duration = Duration::from_secs(60);

    fn come(newcomer: u64, endpoint: &Endpoint, secret: &Secret, config: &Config) -> MemberConn {
        let request = Request { stage: Stage::Waiting, again: LIMIT };
        let request = serde_json::to_vec(&request).unwrap();
        let dialer = JoinDialer::new(secret, newcomer, config).unwrap();
        dialer.dial(endpoint.info().tcp[0], &request, LIMIT, &|| None).map_err(|failure| failure.text()).unwrap()
    }

    fn attempt(number: u64, newcomers: &[u64]) -> Attempt {
        Attempt { number, store: String::new(), members: 1, newcomers: newcomers.to_vec() }
    }

    #[test]
    fn a_newcomer_that_is_gone_when_its_attempt_begins_is_lost_where_it_waited() {
        let config = Config::default().with(|c| c.transport = TransportChoice::Tcp);
        let secret = Secret::of_text("waiting list");
        let endpoint = Endpoint::local(0, secret, &config).unwrap();
        let list = WaitingList::open(&endpoint, secret, &config).unwrap();
        let [dies, _lives] = [1, 2].map(|newcomer| come(newcomer, &endpoint, &secret, &config));
        let wait_for = |newcomers: &[u64]| {
            let start = Instant::now();
            while list.waiting() != newcomers {
                assert!(start.elapsed() < LIMIT, "{newcomers:?} do not wait here");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_for(&[1, 2]);
        let named = list.waiting();
        drop(dies);
        // This forgets it, as every other newcomer that comes does.
        wait_for(&[2]);
        list.begin(attempt(7, &[1, 2]), &named);
        assert_eq!((list.lost(7), list.is_void(7)), (vec![1], true));
        list.conclude(7, false);
        // One that waits elsewhere is not known here.
        list.begin(attempt(8, &[2, 3]), &named);
        assert_eq!((list.lost(8), list.is_void(8)), (vec![], false));
    }
}
