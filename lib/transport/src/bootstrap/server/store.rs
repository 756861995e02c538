//! The store's state and its replies, without any I/O: the member table, exchanges in progress, last heartbeats.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::bootstrap::ledger::comms::Comms;
use crate::bootstrap::ledger::progress::{Health, RankState};
use crate::bootstrap::wire::frame::Hello;
use crate::bootstrap::wire::message::{Bytes, Cause, Failure, ToRank, ToStore};
use tinynccl_sys::threads::lock;

/// Key in a rank's registration: the store ends with its process.
pub const HOSTS_STORE: &str = "hosts_store";
/// The communicator of all ranks.
const WORLD: u32 = 0;
/// Most ranks of a job whose size the first rank sets.
const MOST_RANKS: usize = 1 << 20;
/// Most rejections that are reported to the ranks which wait.
const MAX_NOTES: usize = 8;

/// The ranks that said goodbye, that were lost without one or that aborted the world's communicator, in that order and
/// perhaps twice, with the reason of those that did not leave in order.
pub(crate) type Went = Arc<Mutex<Vec<(usize, Option<String>)>>>;

/// A message and the rank that it goes to.
pub(crate) type Out = (usize, ToRank);

/// Progress of the rendezvous of a store's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Standing {
    /// None of them has registered.
    Empty,
    /// Some of them wait for the others.
    Waiting,
    /// All of them have come.
    Formed,
    /// They have left again, or they will not come together, or the store has ended.
    Over,
}

/// State of one job.
#[derive(Debug)]
pub(crate) struct Store {
    /// Empty until the size of the world is known.
    members: Vec<Option<Member>>,
    /// Ranks that do not fit together end the rendezvous for all.
    strict: bool,
    formed: bool,
    broken: Option<String>,
    /// The launcher has reported a failed process: no job that replaces this one is to be waited for.
    certain: bool,
    /// The communicator of all ranks has failed, and each of them was notified.
    failed: bool,
    exchanges: HashMap<String, Exchange>,
    comms: Comms,
    notes: Vec<String>,
    announced: Option<(usize, usize)>,
    went: Went,
    /// Messages to send: see [`Store::take_out`].
    out: Vec<Out>,
}

#[derive(Debug)]
struct Member {
    state: RankState,
    info: Value,
    last_heard: Instant,
    /// Still here, but only to relay between others, which were notified that it left.
    leaving: bool,
}

impl Member {
    /// Its state as the other ranks see it.
    fn state(&self) -> &RankState {
        if self.leaving { &RankState::Left } else { &self.state }
    }
}

#[derive(Debug)]
struct Exchange {
    members: Vec<usize>,
    values: BTreeMap<usize, Bytes>,
    failed: Option<Failure>,
    answered: BTreeSet<usize>,
}

impl Failure {
    fn message(self, key: &str) -> ToRank {
        ToRank::ExchangeFailed { key: key.to_owned(), failure: self }
    }
}

/// Reason to reject a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: String,
    /// It may be worth a note to the ranks which wait: the client had the right secret.
    pub(crate) note: bool,
    /// The cause may be a job that is just ending: the client may try again for a moment.
    pub(crate) again: bool,
}

impl Store {
    /// Makes a store for `world_size` ranks; `None`: the first one that registers sets their number.
    pub(crate) fn new(world_size: Option<usize>) -> Self {
        Store {
            members: (0..world_size.unwrap_or(0)).map(|_| None).collect(),
            strict: world_size.is_none(),
            formed: false,
            broken: None,
            certain: false,
            failed: false,
            exchanges: HashMap::new(),
            comms: Comms::default(),
            notes: Vec::new(),
            announced: None,
            went: Went::default(),
            out: Vec::new(),
        }
    }

    /// The list that it keeps of the ranks that went.
    pub(crate) fn went(&self) -> Went {
        Arc::clone(&self.went)
    }

    /// The messages that the calls so far have led to.
    pub(crate) fn take_out(&mut self) -> Vec<Out> {
        std::mem::take(&mut self.out)
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    /// Returns the rank of a client with the right secret, if it can become a member.
    pub(crate) fn admit(&self, hello: &Hello) -> Result<usize, Refusal> {
        let (rank, world) = (hello.rank as usize, self.world_size());
        let wrong = |reason| Err(Refusal { reason, note: true, again: false });
        let over = |reason| Err(Refusal { reason, note: false, again: true });
        if world == 0 {
            return match hello.world_size as usize {
                said if rank < said && said <= MOST_RANKS => Ok(rank),
                said => {
                    wrong(format!("rank {rank} of {said}: expected a rank below the world size, {MOST_RANKS} at most"))
                }
            };
        }
        if hello.world_size as usize != world {
            return wrong(format!(
                "rank {rank} was started with world size {}, the store with {world}: all ranks need the same",
                hello.world_size
            ));
        }
        let Some(member) = self.members.get(rank) else {
            return wrong(format!("rank {rank} is out of range: world size {world} has ranks 0 to {}", world - 1));
        };
        match (member.as_ref().map(|m| &m.state), &self.broken) {
            (Some(RankState::Alive), _) => {
                wrong(format!("rank {rank} is here already: two processes were started with the same rank"))
            }
            (Some(RankState::Left), _) => {
                over(format!("rank {rank} was here and has left: this job cannot be joined again"))
            }
            (Some(RankState::Lost(_)), _) => {
                over(format!("rank {rank} was here and was lost: this job cannot be joined again"))
            }
            (None, Some(reason)) => Err(Refusal { reason: reason.clone(), note: false, again: !self.certain }),
            (None, None) => Ok(rank),
        }
    }

    /// Takes in the rank of this hello, which [`Store::admit`] has admitted.
    pub(crate) fn register(&mut self, hello: &Hello, info: Value, now: Instant) {
        let rank = hello.rank as usize;
        if self.members.is_empty() {
            self.members.resize_with(hello.world_size as usize, || None);
        }
        if let Some(member) = self.members.get_mut(rank) {
            *member = Some(Member { state: RankState::Alive, info, last_heard: now, leaving: false });
        }
        if self.members.iter().all(Option::is_some) {
            self.formed = true;
            let infos: Vec<Value> = self.members.iter().flatten().map(|m| m.info.clone()).collect();
            self.announce(|_| ToRank::Table { infos: infos.clone() });
        } else {
            self.out.push((rank, self.waiting()));
        }
    }

    /// Returns the progress of the ranks' rendezvous.
    pub(crate) fn standing(&self) -> Standing {
        match (self.members.iter().any(Option::is_some), self.formed) {
            _ if self.broken.is_some() => Standing::Over,
            (false, _) => Standing::Empty,
            (true, false) => Standing::Waiting,
            (true, true) if self.finished() => Standing::Over,
            (true, true) => Standing::Formed,
        }
    }

    /// A client with the right secret does not fit to the ranks that are here.
    pub(crate) fn misfit(&mut self, reason: &str) {
        if self.strict && !self.formed && self.members.iter().any(Option::is_some) {
            self.break_off(reason.to_owned());
        }
    }

    /// Notes that a client that may be one of ours was rejected: the ranks that wait receive the reason.
    pub(crate) fn note(&mut self, text: String) {
        if !self.formed && self.notes.len() < MAX_NOTES && !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Notifies the ranks which wait of those that are missing, when that has changed. Called now and then.
    pub(crate) fn tick(&mut self) {
        let state = (self.members.iter().flatten().count(), self.notes.len());
        if !self.formed && self.broken.is_none() && self.announced != Some(state) {
            self.announced = Some(state);
            let message = self.waiting();
            self.announce(|_| message.clone());
        }
    }

    fn waiting(&self) -> ToRank {
        let hosts = |m: &Option<Member>| m.as_ref().is_some_and(|m| m.info.get(HOSTS_STORE).is_some());
        let host = self.members.iter().position(hosts);
        ToRank::Waiting { missing: self.missing(), notes: self.notes.clone(), host }
    }

    fn missing(&self) -> Vec<usize> {
        self.members.iter().enumerate().filter(|(_, m)| m.is_none()).map(|(rank, _)| rank).collect()
    }

    /// True when every rank that ever registered is gone, by goodbye or otherwise.
    pub(crate) fn finished(&self) -> bool {
        !self.members.iter().flatten().any(|m| m.state == RankState::Alive)
    }

    /// Returns true once waiting for goodbyes helps no rank: the world's communicator has failed, or the ranks will not
    /// come together.
    pub(crate) fn failed(&self) -> bool {
        self.failed || self.broken.is_some()
    }

    /// A message of a member.
    pub(crate) fn handle(&mut self, rank: usize, message: ToStore, now: Instant) {
        if let Some(Some(member)) = self.members.get_mut(rank) {
            member.last_heard = now;
        }
        match message {
            ToStore::Register { .. } | ToStore::Proof { .. } | ToStore::Resume { .. } | ToStore::Took { .. } => {}
            ToStore::Beat { progress, calls } => {
                self.comms.advance(rank, progress);
                for news in self.comms.compare(rank, &calls) {
                    self.announce(|_| ToRank::Disagree(news.clone()));
                }
            }
            ToStore::Put { key, members, value } => self.put(rank, key, members, value),
            ToStore::GiveUp { key, waited } => self.give_up(rank, &key, waited),
            ToStore::Health { ticket, comm } => {
                self.out.push((rank, ToRank::Health { ticket, ranks: self.health(comm, now) }));
            }
            ToStore::Abort { comm, reason } => {
                self.failed |= comm == WORLD;
                if comm == WORLD && self.formed {
                    lock(&self.went).push((rank, Some(reason.clone())));
                }
                self.announce(|r| (r != rank).then(|| ToRank::Abort { from: rank, comm, reason: reason.clone() }));
            }
            ToStore::Leave => self.leaving(rank),
            ToStore::Bye { reason } => {
                let detail = if reason.is_empty() { "it said goodbye".to_owned() } else { reason };
                self.gone(rank, RankState::Left, &detail);
            }
        }
    }

    /// The connection of a member closed without a goodbye.
    pub(crate) fn lost(&mut self, rank: usize, detail: String) {
        self.gone(rank, RankState::Lost(detail.clone()), &detail);
    }

    /// The process that was to become `rank` has failed.
    pub(crate) fn never_comes(&mut self, rank: usize, how: &str) {
        self.certain = true;
        if !self.formed && self.members.get(rank).is_some_and(Option::is_none) {
            self.break_off(format!("rank {rank} {how} before it had joined"));
        }
    }

    /// Ends the rendezvous: the ranks will not come together, and all are notified of the cause.
    fn break_off(&mut self, reason: String) {
        let missing = self.missing();
        self.broken.get_or_insert(reason.clone());
        self.announce(|_| ToRank::NotFormed { missing: missing.clone(), reason: reason.clone() });
    }

    /// Goodbye to all but the store.
    fn leaving(&mut self, rank: usize) {
        match self.members.get_mut(rank) {
            Some(Some(member)) if self.formed && *member.state() == RankState::Alive => member.leaving = true,
            _ => return,
        }
        self.announce(|r| (r != rank).then_some(ToRank::Left { rank }));
        self.fail_exchanges_of(rank, &format!("rank {rank} has left"));
    }

    fn gone(&mut self, rank: usize, state: RankState, detail: &str) {
        let Some(Some(member)) = self.members.get_mut(rank) else { return };
        if member.state != RankState::Alive {
            return;
        }
        self.comms.gone(rank);
        if member.leaving {
            // The others have been notified.
            member.state = RankState::Left;
            return;
        }
        let (word, news) = match &state {
            RankState::Lost(detail) => ("was lost", ToRank::Lost { rank, detail: detail.clone() }),
            _ => ("has left", ToRank::Left { rank }),
        };
        self.failed |= matches!(state, RankState::Lost(_));
        member.state = state;
        if !self.formed {
            return self.break_off(format!("rank {rank} {word} before all ranks had come: {detail}"));
        }
        // Before any rank receives it, and goes because of it.
        lock(&self.went).push((rank, (word == "was lost").then(|| detail.to_owned())));
        self.announce(|_| news.clone());
        self.fail_exchanges_of(rank, &format!("rank {rank} {word}: {detail}"));
    }

    /// No exchange that `rank` takes part in will complete.
    fn fail_exchanges_of(&mut self, rank: usize, reason: &str) {
        let concerned: Vec<String> =
            self.exchanges.iter().filter(|(_, e)| e.members.contains(&rank)).map(|(k, _)| k.clone()).collect();
        for key in concerned {
            let failure = Failure { missing: vec![rank], cause: Cause::Gone, reason: reason.to_owned() };
            self.fail_exchange(&key, failure);
        }
    }

    fn put(&mut self, rank: usize, key: String, members: Vec<usize>, value: Bytes) {
        let mismatch = |reason| Failure { missing: Vec::new(), cause: Cause::Mismatch, reason };
        if !members.contains(&rank) || members.iter().any(|&m| m >= self.world_size()) {
            let reason = format!("rank {rank} named members {members:?}, of a world of {}", self.world_size());
            return self.out.push((rank, mismatch(reason).message(&key)));
        }
        let exchange = self.exchanges.entry(key.clone()).or_insert_with(|| Exchange {
            members: members.clone(),
            values: BTreeMap::new(),
            failed: None,
            answered: BTreeSet::new(),
        });
        if exchange.members != members {
            let failure = mismatch(format!(
                "rank {rank} calls it among ranks {members:?}, another rank among {:?}: every rank must make the same calls in the same order",
                exchange.members
            ));
            self.out.push((rank, failure.clone().message(&key)));
            exchange.answered.insert(rank);
            return self.fail_exchange(&key, failure);
        }
        exchange.values.insert(rank, value);
        if let Some(failure) = exchange.failed.clone() {
            return self.fail_exchange(&key, failure);
        }
        if exchange.values.len() == members.len() {
            let values: Vec<Bytes> = members.iter().filter_map(|m| exchange.values.get(m).cloned()).collect();
            self.exchanges.remove(&key);
            let message = ToRank::Values { key, values };
            return self.out.extend(members.iter().map(|&m| (m, message.clone())));
        }
        let gone =
            members.iter().find_map(|&m| match self.members.get(m).and_then(Option::as_ref).map(Member::state) {
                Some(RankState::Left) => Some((m, format!("rank {m} has left"))),
                Some(RankState::Lost(detail)) => Some((m, format!("rank {m} was lost: {detail}"))),
                _ => None,
            });
        if let Some((m, reason)) = gone {
            self.fail_exchange(&key, Failure { missing: vec![m], cause: Cause::Gone, reason });
        }
    }

    fn give_up(&mut self, rank: usize, key: &str, waited: Duration) {
        // Else it completed or failed while this message was in flight: the rank has the outcome already.
        if let Some(e) = self.exchanges.get(key).filter(|e| e.failed.is_none()) {
            let missing: Vec<usize> = e.members.iter().copied().filter(|m| !e.values.contains_key(m)).collect();
            let reason = format!("rank {rank} waited {waited:.1?} and gave up");
            self.fail_exchange(key, Failure { missing, cause: Cause::Timeout, reason });
        }
    }

    /// Notifies every member that takes part so far; later ones are notified when they come. The exchange is forgotten
    /// when all are notified or gone.
    fn fail_exchange(&mut self, key: &str, failure: Failure) {
        let Some(exchange) = self.exchanges.get_mut(key) else { return };
        // The first cause stays.
        let failure = exchange.failed.get_or_insert(failure).clone();
        for &m in exchange.values.keys() {
            if exchange.answered.insert(m) {
                self.out.push((m, failure.clone().message(key)));
            }
        }
        let alive =
            |m: usize| self.members.get(m).and_then(Option::as_ref).is_some_and(|x| *x.state() == RankState::Alive);
        if exchange.members.iter().all(|m| exchange.answered.contains(m) || !alive(*m)) {
            self.exchanges.remove(key);
        }
    }

    /// Returns the time since the last message of a rank.
    pub(crate) fn silence(&self, rank: usize, now: Instant) -> Duration {
        let heard = self.members.get(rank).and_then(Option::as_ref).map_or(now, |member| member.last_heard);
        now.saturating_duration_since(heard)
    }

    fn health(&self, comm: u32, now: Instant) -> Vec<Health> {
        let known = |(rank, member): (usize, &Option<Member>)| {
            let member = member.as_ref()?;
            Some(Health {
                rank,
                state: member.state().clone(),
                age: now.saturating_duration_since(member.last_heard),
                progress: self.comms.progress(comm, rank),
            })
        };
        self.members.iter().enumerate().filter_map(known).collect()
    }

    /// To every rank that is here, but for those for which `message` gives none.
    fn announce<M: Into<Option<ToRank>>>(&mut self, message: impl Fn(usize) -> M) {
        let here =
            |(_, member): &(usize, &Option<Member>)| member.as_ref().is_some_and(|m| m.state == RankState::Alive);
        let ranks = self.members.iter().enumerate().filter(here).map(|(rank, _)| rank);
        self.out.extend(ranks.filter_map(|rank| Some((rank, message(rank).into()?))));
    }
}
