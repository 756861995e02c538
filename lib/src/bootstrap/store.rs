//! The store's state and its answers, without any I/O: who is here, exchanges under way, last heartbeats.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::calls::{Comparison, Disagreement, Made};
use super::frame::Hello;
use super::message::{Bytes, Cause, ToRank, ToStore};
use super::progress::{Health, RankState, Snapshot};

/// In what a rank says of itself: the store ends with its process.
pub(crate) const HOSTS_STORE: &str = "hosts_store";
/// The communicator of all ranks.
const WORLD: u32 = 0;
/// Most refusals that are told to the ranks which wait.
const MAX_NOTES: usize = 8;
/// Closed communicators of a rank that are remembered, for members that close later.
const CLOSED: usize = 64;

/// A message and the rank that it goes to.
pub(crate) type Out = (usize, ToRank);

/// State of one job.
#[derive(Debug)]
pub(crate) struct Store {
    members: Vec<Option<Member>>,
    formed: bool,
    broken: Option<String>,
    /// Who started the ranks says so: no job that takes this one's place is to be waited for.
    certain: bool,
    /// The communicator of all ranks has failed, and each of them was told.
    failed: bool,
    exchanges: HashMap<String, Exchange>,
    /// Calls by number and first member of a communicator.
    calls: HashMap<(u32, usize), Comparison>,
    notes: Vec<String>,
    announced: Option<(usize, usize)>,
}

#[derive(Debug)]
struct Member {
    state: RankState,
    info: Value,
    heard: Instant,
    progress: Vec<(u32, Snapshot)>,
    /// Still here, but only to relay between others, which have been told that it left.
    leaving: bool,
}

impl Member {
    /// Its progress now. A communicator that it has closed stays as it was last.
    fn advance(&mut self, mut progress: Vec<(u32, Snapshot)>) {
        let known = |comm: u32| progress.iter().any(|(c, _)| *c == comm);
        let mut closed: Vec<_> = self.progress.drain(..).filter(|(c, p)| p.closed && !known(*c)).collect();
        closed.drain(..closed.len().saturating_sub(CLOSED));
        progress.extend(closed);
        self.progress = progress;
    }

    /// As the others are to see it.
    fn state(&self) -> &RankState {
        if self.leaving { &RankState::Left } else { &self.state }
    }
}

#[derive(Debug)]
struct Exchange {
    members: Vec<usize>,
    values: BTreeMap<usize, Bytes>,
    failed: Option<Failure>,
    told: BTreeSet<usize>,
}

#[derive(Debug, Clone)]
struct Failure {
    missing: Vec<usize>,
    cause: Cause,
    reason: String,
}

impl Failure {
    fn message(self, key: &str) -> ToRank {
        ToRank::ExchangeFailed { key: key.to_owned(), missing: self.missing, cause: self.cause, reason: self.reason }
    }
}

/// Why a client is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: String,
    /// It may be worth a note to the ranks which wait: the client had the right secret.
    pub(crate) note: bool,
    /// What is in the way may be a job that is just ending: the client may try again for a moment.
    pub(crate) again: bool,
}

impl Store {
    pub(crate) fn new(world_size: usize) -> Self {
        Store {
            members: (0..world_size).map(|_| None).collect(),
            formed: false,
            broken: None,
            certain: false,
            failed: false,
            exchanges: HashMap::new(),
            calls: HashMap::new(),
            notes: Vec::new(),
            announced: None,
        }
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    /// Whether a client with the right secret can become a member.
    pub(crate) fn admit(&self, hello: &Hello) -> Result<usize, Refusal> {
        let (rank, world) = (hello.rank as usize, self.world_size());
        let wrong = |reason| Err(Refusal { reason, note: true, again: false });
        let over = |reason| Err(Refusal { reason, note: false, again: true });
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

    /// Takes `rank` in; [`Store::admit`] said yes.
    pub(crate) fn register(&mut self, rank: usize, info: Value, now: Instant) -> Vec<Out> {
        if let Some(member) = self.members.get_mut(rank) {
            *member = Some(Member { state: RankState::Alive, info, heard: now, progress: Vec::new(), leaving: false });
        }
        if self.members.iter().all(Option::is_some) {
            self.formed = true;
            let infos: Vec<Value> = self.members.iter().flatten().map(|m| m.info.clone()).collect();
            let mut out = Vec::new();
            self.to_all(|_| ToRank::Table { infos: infos.clone() }, &mut out);
            return out;
        }
        vec![(rank, self.waiting())]
    }

    /// A client that may be one of ours was refused: the ranks that wait should hear why one is missing.
    pub(crate) fn note(&mut self, text: String) {
        if !self.formed && self.notes.len() < MAX_NOTES && !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Called now and then: tells the ranks which wait who is missing, when that has changed.
    pub(crate) fn tick(&mut self) -> Vec<Out> {
        let mut out = Vec::new();
        let state = (self.members.iter().flatten().count(), self.notes.len());
        if !self.formed && self.broken.is_none() && self.announced != Some(state) {
            self.announced = Some(state);
            let message = self.waiting();
            self.to_all(|_| message.clone(), &mut out);
        }
        out
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

    /// True when nobody is helped by waiting for goodbyes: the world's communicator has failed.
    pub(crate) fn failed(&self) -> bool {
        self.failed || self.broken.is_some()
    }

    /// A message of a member.
    pub(crate) fn handle(&mut self, rank: usize, message: ToStore, now: Instant) -> Vec<Out> {
        if let Some(Some(member)) = self.members.get_mut(rank) {
            member.heard = now;
        }
        match message {
            ToStore::Register { .. } | ToStore::Proof { .. } => Vec::new(),
            ToStore::Beat { progress, calls } => {
                if let Some(Some(member)) = self.members.get_mut(rank) {
                    member.advance(progress);
                }
                self.compare(rank, calls)
            }
            ToStore::Put { key, members, value } => self.put(rank, key, members, value),
            ToStore::GiveUp { key, waited } => self.give_up(rank, &key, waited),
            ToStore::Health { ticket, comm } => {
                vec![(rank, ToRank::Health { ticket, ranks: self.health(comm, now) })]
            }
            ToStore::Abort { comm, reason } => {
                self.failed |= comm == WORLD;
                let mut out = Vec::new();
                self.to_all(
                    |r| if r == rank { None } else { Some(ToRank::Abort { from: rank, comm, reason: reason.clone() }) },
                    &mut out,
                );
                out
            }
            ToStore::Leave => self.leaving(rank),
            ToStore::Bye { reason } => {
                let detail = if reason.is_empty() { "it said goodbye".to_owned() } else { reason };
                self.gone(rank, RankState::Left, &detail)
            }
        }
    }

    /// Compares what `rank` tells of its calls with what others told.
    fn compare(&mut self, rank: usize, calls: Vec<(u32, usize, Vec<Made>)>) -> Vec<Out> {
        let mut out = Vec::new();
        for (comm, first, calls) in calls {
            if let Some((ranks, calls)) = self.calls.entry((comm, first)).or_default().take(rank, &calls) {
                let news = Disagreement { comm, first, ranks, calls };
                self.to_all(|_| ToRank::Disagree(news.clone()), &mut out);
            }
        }
        if self.calls.len() > CLOSED {
            let used: BTreeSet<u32> =
                self.members.iter().flatten().flat_map(|m| &m.progress).map(|(comm, _)| *comm).collect();
            self.calls.retain(|(comm, _), _| used.contains(comm));
        }
        out
    }

    /// The connection of a member closed without a goodbye.
    pub(crate) fn lost(&mut self, rank: usize, detail: String) -> Vec<Out> {
        self.gone(rank, RankState::Lost(detail.clone()), &detail)
    }

    /// The process that was to become `rank` has failed.
    pub(crate) fn never_comes(&mut self, rank: usize, how: &str) -> Vec<Out> {
        let mut out = Vec::new();
        self.certain = true;
        if !self.formed && self.members.get(rank).is_some_and(Option::is_none) {
            self.break_off(format!("rank {rank} {how} before it had joined"), &mut out);
        }
        out
    }

    /// The ranks will not come together: the first cause is told to all.
    fn break_off(&mut self, reason: String, out: &mut Vec<Out>) {
        let missing = self.missing();
        self.broken.get_or_insert(reason.clone());
        self.to_all(|_| ToRank::NotFormed { missing: missing.clone(), reason: reason.clone() }, out);
    }

    /// Goodbye to all but the store.
    fn leaving(&mut self, rank: usize) -> Vec<Out> {
        let mut out = Vec::new();
        match self.members.get_mut(rank) {
            Some(Some(member)) if self.formed && *member.state() == RankState::Alive => member.leaving = true,
            _ => return out,
        }
        self.to_all(|r| (r != rank).then_some(ToRank::Left { rank }), &mut out);
        self.fail_exchanges_of(rank, &format!("rank {rank} has left"), &mut out);
        out
    }

    fn gone(&mut self, rank: usize, state: RankState, detail: &str) -> Vec<Out> {
        let mut out = Vec::new();
        let Some(Some(member)) = self.members.get_mut(rank) else { return out };
        if member.state != RankState::Alive {
            return out;
        }
        if member.leaving {
            // The others have heard it.
            member.state = RankState::Left;
            return out;
        }
        let (word, news) = match &state {
            RankState::Lost(detail) => ("was lost", ToRank::Lost { rank, detail: detail.clone() }),
            _ => ("has left", ToRank::Left { rank }),
        };
        self.failed |= matches!(state, RankState::Lost(_));
        member.state = state;
        if !self.formed {
            self.break_off(format!("rank {rank} {word} before all ranks had come: {detail}"), &mut out);
            return out;
        }
        self.to_all(|_| news.clone(), &mut out);
        self.fail_exchanges_of(rank, &format!("rank {rank} {word}: {detail}"), &mut out);
        out
    }

    /// No exchange that `rank` takes part in will complete.
    fn fail_exchanges_of(&mut self, rank: usize, reason: &str, out: &mut Vec<Out>) {
        let concerned: Vec<String> =
            self.exchanges.iter().filter(|(_, e)| e.members.contains(&rank)).map(|(k, _)| k.clone()).collect();
        for key in concerned {
            let failure = Failure { missing: vec![rank], cause: Cause::Gone, reason: reason.to_owned() };
            self.fail_exchange(&key, failure, out);
        }
    }

    fn put(&mut self, rank: usize, key: String, members: Vec<usize>, value: Bytes) -> Vec<Out> {
        let mut out = Vec::new();
        if !members.contains(&rank) || members.iter().any(|&m| m >= self.world_size()) {
            let reason = format!("rank {rank} named members {members:?}, of a world of {}", self.world_size());
            let failure = Failure { missing: Vec::new(), cause: Cause::Mismatch, reason };
            return vec![(rank, failure.message(&key))];
        }
        let exchange = self.exchanges.entry(key.clone()).or_insert_with(|| Exchange {
            members: members.clone(),
            values: BTreeMap::new(),
            failed: None,
            told: BTreeSet::new(),
        });
        if exchange.members != members {
            let reason = format!(
                "rank {rank} calls it among ranks {members:?}, another rank among {:?}: every rank must make the same calls in the same order",
                exchange.members
            );
            let failure = Failure { missing: Vec::new(), cause: Cause::Mismatch, reason };
            out.push((rank, failure.clone().message(&key)));
            exchange.told.insert(rank);
            self.fail_exchange(&key, failure, &mut out);
            return out;
        }
        exchange.values.insert(rank, value);
        if let Some(failure) = exchange.failed.clone() {
            self.fail_exchange(&key, failure, &mut out);
            return out;
        }
        if exchange.values.len() == members.len() {
            let values: Vec<Bytes> = members.iter().filter_map(|m| exchange.values.get(m).cloned()).collect();
            self.exchanges.remove(&key);
            out.extend(members.iter().map(|&m| (m, ToRank::Values { key: key.clone(), values: values.clone() })));
            return out;
        }
        let gone =
            members.iter().find_map(|&m| match self.members.get(m).and_then(Option::as_ref).map(Member::state) {
                Some(RankState::Left) => Some((m, format!("rank {m} has left"))),
                Some(RankState::Lost(detail)) => Some((m, format!("rank {m} was lost: {detail}"))),
                _ => None,
            });
        if let Some((m, reason)) = gone {
            self.fail_exchange(&key, Failure { missing: vec![m], cause: Cause::Gone, reason }, &mut out);
        }
        out
    }

    fn give_up(&mut self, rank: usize, key: &str, waited: Duration) -> Vec<Out> {
        let mut out = Vec::new();
        match self.exchanges.get(key) {
            // It completed or failed while this message was on its way: the rank has the outcome already.
            None => {}
            Some(e) if e.failed.is_some() => {}
            Some(e) => {
                let missing: Vec<usize> = e.members.iter().copied().filter(|m| !e.values.contains_key(m)).collect();
                let reason = format!("rank {rank} waited {waited:.1?} and gave up");
                self.fail_exchange(key, Failure { missing, cause: Cause::Timeout, reason }, &mut out);
            }
        }
        out
    }

    /// Tells every member that takes part so far; later ones are told when they come. Forgotten when all have heard or are gone.
    fn fail_exchange(&mut self, key: &str, failure: Failure, out: &mut Vec<Out>) {
        let Some(exchange) = self.exchanges.get_mut(key) else { return };
        // The first cause stays.
        let failure = exchange.failed.get_or_insert(failure).clone();
        for &m in exchange.values.keys() {
            if exchange.told.insert(m) {
                out.push((m, failure.clone().message(key)));
            }
        }
        let alive =
            |m: usize| self.members.get(m).and_then(Option::as_ref).is_some_and(|x| *x.state() == RankState::Alive);
        if exchange.members.iter().all(|m| exchange.told.contains(m) || !alive(*m)) {
            self.exchanges.remove(key);
        }
    }

    fn health(&self, comm: u32, now: Instant) -> Vec<Health> {
        let known = |(rank, member): (usize, &Option<Member>)| {
            let member = member.as_ref()?;
            let progress = member.progress.iter().find(|(c, _)| *c == comm).map(|(_, p)| *p);
            Some(Health {
                rank,
                state: member.state().clone(),
                age: now.saturating_duration_since(member.heard),
                progress,
            })
        };
        self.members.iter().enumerate().filter_map(known).collect()
    }

    /// To every rank that is here, but for those for which `message` gives none.
    fn to_all<M: Into<Option<ToRank>>>(&self, message: impl Fn(usize) -> M, out: &mut Vec<Out>) {
        for (rank, member) in self.members.iter().enumerate() {
            if member.as_ref().is_some_and(|m| m.state == RankState::Alive) {
                out.extend(message(rank).into().map(|m| (rank, m)));
            }
        }
    }
}
