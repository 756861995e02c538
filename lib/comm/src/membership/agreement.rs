//! Uniform agreement on a value, on the living members and on the newcomers that they have met, although members die
//! meanwhile. No I/O, no clock, no lock.
//!
//! Paxos (Lamport, 1998) with the quorum of early-returning agreement (Herault et al., "Practical scalable consensus
//! for pseudo-synchronous distributed systems", SC'15). The lowest member that is not known to be gone leads:
//!
//! ```text
//!   leader                                     each member that is not gone
//!   Prepare { ballot }                     ─▶
//!                                          ◀─  Promise { its vote, what it has accepted }, once it has called
//!   Accept { ballot, outcome }             ─▶  the outcome accepted with the highest ballot, or a new one
//!                                          ◀─  Accepted
//!   Decided { outcome }                    ─▶
//! ```
//! The next leader, once one is gone, goes through the same two phases, and its promises show what may be decided. So
//! a death costs at most one more leader's two round trips.
//!
//! **Quorum.** A leader proceeds with the replies of all members that are not gone: dead (proven, see
//! [`beacon`](tinynccl_transport::beacon)) or silent (suspected). Those that replied must outnumber the missing ones
//! whose death is not proven. Two disjoint groups cannot both do that while a member of each lives: each counts the
//! other among its missing. A member that did not run for a while counts the dead as missing, too. With crashes alone,
//! where every member that is gone is dead, any two quorums share a member, so the outcome is uniform: it is also that
//! of members that died after they had decided.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Number of a leader's attempt; `ballot % members` is the leader.
pub(crate) type Ballot = u64;

/// Most newcomers of one outcome: a message with their numbers still fits.
pub(crate) const MOST_NEWCOMERS: usize = 64;

/// One member's part of an outcome.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Vote {
    pub(crate) value: u64,
    /// Numbers of processes that are no members and concern the agreement.
    pub(crate) newcomers: Vec<u64>,
}

/// Result of an agreement, equal on all members that get one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Bitwise AND of the values of `alive`.
    pub(crate) value: u64,
    /// The members whose votes count, in order. One of them may have died since.
    pub(crate) alive: Vec<usize>,
    /// Union of the newcomers that `alive` named, the lowest [`MOST_NEWCOMERS`], in order.
    pub(crate) newcomers: Vec<u64>,
    /// The leader's [`Agreement::offer`].
    pub(crate) offer: Vec<u8>,
}

/// Message between two members. `dead` are proven deaths that the sender knows of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The sender has called, and takes the receiver for the leader.
    Waiting { dead: BTreeSet<usize> },
    /// The leader asks for a promise to reply to no lower ballot.
    Prepare { ballot: Ballot, dead: BTreeSet<usize> },
    /// The promise, with the sender's vote, and the outcome that it has accepted in an earlier ballot.
    Promise { ballot: Ballot, vote: Vote, accepted: Option<(Ballot, Outcome)>, dead: BTreeSet<usize> },
    /// The leader asks to accept an outcome.
    Accept { ballot: Ballot, outcome: Outcome },
    /// The outcome of this ballot is accepted.
    Accepted { ballot: Ballot },
    /// The sender has promised this higher ballot to another leader.
    Rejected { ballot: Ballot },
    /// The outcome is decided.
    Decided { outcome: Outcome },
    /// The leader gives up: with these members missing it has no quorum.
    NoQuorum { missing: Vec<usize> },
}

/// Messages to send: the receiver and the message.
pub(crate) type Out = Vec<(usize, Message)>;

/// A leader's attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Attempt {
    ballot: Ballot,
    /// Each member's vote, and the outcome that it had accepted.
    promises: BTreeMap<usize, (Vote, Option<(Ballot, Outcome)>)>,
    /// The outcome in the second phase, and the members that have accepted it.
    proposed: Option<(Outcome, BTreeSet<usize>)>,
}

/// One member's state in one agreement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Agreement {
    rank: usize,
    size: usize,
    /// Our vote, while we take part.
    vote: Option<Vote>,
    /// We need a majority of all members, dead ones included.
    strict: bool,
    offer: Option<Vec<u8>>,
    dead: BTreeSet<usize>,
    silent: BTreeSet<usize>,
    promised: Option<Ballot>,
    /// Our promise has been sent: not before we have called.
    replied: bool,
    accepted: Option<(Ballot, Outcome)>,
    attempt: Option<Attempt>,
    /// The leader that knows that we wait.
    followed: Option<usize>,
    /// The members that wait for us.
    waiting: BTreeSet<usize>,
    missing: Option<Vec<usize>>,
    decided: Option<Outcome>,
}

impl Agreement {
    /// Member `rank` of `size`, which knows that the members `dead` are dead.
    pub(crate) fn new(rank: usize, size: usize, dead: BTreeSet<usize>) -> Agreement {
        Agreement {
            rank,
            size,
            vote: None,
            strict: false,
            offer: None,
            dead,
            silent: BTreeSet::new(),
            promised: None,
            replied: false,
            accepted: None,
            attempt: None,
            followed: None,
            waiting: BTreeSet::new(),
            missing: None,
            decided: None,
        }
    }

    /// Takes part, with this vote. A `strict` member leads only a majority of all members: it may have been left
    /// behind by members that are dead now.
    pub(crate) fn call(&mut self, vote: Vote, strict: bool, out: &mut Out) {
        (self.vote, self.strict) = (Some(vote), strict);
        (self.missing, self.followed) = (None, None);
        self.promise(out);
        self.proceed(out);
    }

    /// Sets what this member adds to an outcome that it proposes ([`Agreement::wants_offer`]).
    pub(crate) fn offer(&mut self, offer: Vec<u8>, out: &mut Out) {
        self.offer = Some(offer);
        self.proceed(out);
    }

    /// Takes no part any more, until the next call: a leader notifies the others, if it has no quorum.
    pub(crate) fn give_up(&mut self, out: &mut Out) {
        if let (Some(_), Some(missing)) = (self.attempt.take(), self.no_quorum()) {
            let missing = missing.to_vec();
            self.send_all(out, |_| Message::NoQuorum { missing: missing.clone() });
        }
        (self.vote, self.offer) = (None, None);
        self.silent.clear();
    }

    /// Member `rank` is dead, which is certain.
    pub(crate) fn dead(&mut self, rank: usize, out: &mut Out) {
        if self.dead.insert(rank) {
            // The leader may need the proof.
            self.followed = None;
            self.proceed(out);
        }
    }

    /// Member `rank` has sent no sign of life for too long. It counts as gone until it sends a message.
    pub(crate) fn silent(&mut self, rank: usize, out: &mut Out) {
        if rank != self.rank && self.silent.insert(rank) {
            self.proceed(out);
        }
    }

    /// A message of member `from`.
    pub(crate) fn receive(&mut self, from: usize, message: Message, out: &mut Out) {
        if self.silent.remove(&from) {
            self.ask_again(from, out);
        }
        if let (Some(outcome), Message::Waiting { .. } | Message::Prepare { .. } | Message::Accept { .. }) =
            (&self.decided, &message)
        {
            return out.push((from, Message::Decided { outcome: outcome.clone() }));
        }
        match message {
            Message::Waiting { dead } => {
                self.dead.extend(dead);
                self.waiting.insert(from);
            }
            Message::Prepare { ballot, dead } => {
                self.dead.extend(dead);
                if self.follows(from, ballot, out) {
                    self.replied = false;
                    self.promise(out);
                }
            }
            Message::Promise { ballot, vote, accepted, dead } => {
                self.dead.extend(dead);
                if let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.ballot == ballot) {
                    attempt.promises.insert(from, (vote, accepted));
                }
            }
            Message::Accept { ballot, outcome } => {
                if self.follows(from, ballot, out) {
                    self.accepted = Some((ballot, outcome));
                    out.push((from, Message::Accepted { ballot }));
                }
            }
            Message::Accepted { ballot } => {
                let attempt = self.attempt.as_mut().filter(|attempt| attempt.ballot == ballot);
                if let Some((_, accepted)) = attempt.and_then(|attempt| attempt.proposed.as_mut()) {
                    accepted.insert(from);
                }
            }
            Message::Rejected { ballot } => {
                if self.attempt.as_ref().is_some_and(|attempt| attempt.ballot < ballot) {
                    self.attempt = None;
                    self.promised = self.promised.max(Some(ballot));
                    // Promised by another member; our own promise goes to that leader when it asks.
                    self.replied = true;
                }
            }
            Message::Decided { outcome } => self.decide(outcome, out),
            Message::NoQuorum { missing } => self.missing = Some(missing),
        }
        self.proceed(out);
    }

    /// The outcome, once it is decided.
    pub(crate) fn decided(&self) -> Option<&Outcome> {
        self.decided.as_ref()
    }

    /// The members whose deaths are proven.
    pub(crate) fn proven(&self) -> &BTreeSet<usize> {
        &self.dead
    }

    /// True when this member is about to propose an outcome, and needs [`Agreement::offer`] for that.
    pub(crate) fn wants_offer(&self) -> bool {
        self.decided.is_none()
            && self.offer.is_none()
            && self.vote.is_some()
            && self.attempt.as_ref().is_some_and(|attempt| attempt.proposed.is_none() && self.has_all(attempt))
    }

    /// The members without a sign of life, if those that replied are too few to go on without them.
    pub(crate) fn no_quorum(&self) -> Option<&[usize]> {
        self.missing.as_deref()
    }

    /// The members whose replies are awaited: their deaths must be noticed.
    pub(crate) fn awaited(&self) -> Vec<usize> {
        match &self.attempt {
            _ if self.decided.is_some() || self.vote.is_none() => Vec::new(),
            None => Vec::from_iter(Some(self.leader()).filter(|&leader| leader != self.rank)),
            Some(attempt) => self.others().filter(|&rank| !self.is_gone(rank) && !attempt.has(rank)).collect(),
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size).filter(move |&other| other != rank)
    }

    fn is_gone(&self, rank: usize) -> bool {
        self.dead.contains(&rank) || self.silent.contains(&rank)
    }

    /// The member to follow: the one that has our promise, or the lowest one.
    fn leader(&self) -> usize {
        let owner = self.promised.map(|ballot| (ballot % self.size as u64) as usize);
        match owner.filter(|&owner| owner != self.rank && !self.is_gone(owner)) {
            Some(owner) => owner,
            None if self.attempt.is_some() => self.rank,
            None => (0..self.size).find(|&rank| !self.is_gone(rank)).unwrap_or(self.rank),
        }
    }

    /// Follows the leader of `ballot`, unless a higher one has our promise.
    fn follows(&mut self, from: usize, ballot: Ballot, out: &mut Out) -> bool {
        if let Some(promised) = self.promised.filter(|&promised| promised > ballot) {
            out.push((from, Message::Rejected { ballot: promised }));
            return false;
        }
        (self.promised, self.attempt, self.followed) = (Some(ballot), None, Some(from));
        true
    }

    /// Sends the promise that a leader has asked for, if we have called.
    fn promise(&mut self, out: &mut Out) {
        let (Some(vote), Some(ballot), false, None) = (&self.vote, self.promised, self.replied, &self.decided) else {
            return;
        };
        let vote = vote.clone();
        let leader = (ballot % self.size as u64) as usize;
        if leader != self.rank {
            self.replied = true;
            self.followed = Some(leader);
            let (accepted, dead) = (self.accepted.clone(), self.dead.clone());
            out.push((leader, Message::Promise { ballot, vote, accepted, dead }));
        }
    }

    /// Sends to every other member that is not dead.
    fn send_all(&self, out: &mut Out, message: impl Fn(usize) -> Message) {
        out.extend(self.others().filter(|rank| !self.dead.contains(rank)).map(|rank| (rank, message(rank))));
    }

    /// Repeats the request of the phase for a member that had been taken for gone.
    fn ask_again(&self, rank: usize, out: &mut Out) {
        let Some(attempt) = &self.attempt else { return };
        let ballot = attempt.ballot;
        match &attempt.proposed {
            None if !attempt.promises.contains_key(&rank) => {
                out.push((rank, Message::Prepare { ballot, dead: self.dead.clone() }));
            }
            Some((outcome, _)) if !attempt.has(rank) => {
                out.push((rank, Message::Accept { ballot, outcome: outcome.clone() }));
            }
            _ => {}
        }
    }

    fn decide(&mut self, outcome: Outcome, out: &mut Out) {
        if self.decided.is_some() {
            return;
        }
        let message = Message::Decided { outcome: outcome.clone() };
        match self.attempt.take() {
            Some(_) => self.send_all(out, |_| message.clone()),
            None => out.extend(std::mem::take(&mut self.waiting).into_iter().map(|rank| (rank, message.clone()))),
        }
        self.decided = Some(outcome);
    }

    /// True when those that `replied` outnumber the missing ones.
    fn is_quorum(&self, replied: &BTreeSet<usize>) -> bool {
        replied.len() > self.missing(replied).len()
    }

    fn has_all(&self, attempt: &Attempt) -> bool {
        self.others().all(|rank| self.is_gone(rank) || attempt.has(rank))
    }

    /// Does what has become possible.
    fn proceed(&mut self, out: &mut Out) {
        let Some(vote) = self.vote.clone().filter(|_| self.decided.is_none()) else { return };
        let leader = self.leader();
        if leader != self.rank {
            self.attempt = None;
            if self.followed != Some(leader) {
                self.followed = Some(leader);
                out.push((leader, Message::Waiting { dead: self.dead.clone() }));
            }
            return;
        }
        let attempt = match self.attempt.take() {
            Some(attempt) => attempt,
            None => self.prepare(vote, out),
        };
        self.attempt = Some(attempt);
        self.missing = None;
        self.propose(out);
        self.conclude(out);
    }

    /// Begins the first phase.
    fn prepare(&mut self, vote: Vote, out: &mut Out) -> Attempt {
        let (rank, size) = (self.rank as u64, self.size as u64);
        // Saturating: a ballot is what another process has sent.
        let after = self.promised.map_or(0, |promised| promised.saturating_add(1));
        let ballot = after.saturating_add((rank + size - after % size) % size);
        (self.promised, self.replied) = (Some(ballot), true);
        let dead = &self.dead;
        let reached = self.others().filter(|&rank| !self.is_gone(rank));
        out.extend(reached.map(|rank| (rank, Message::Prepare { ballot, dead: dead.clone() })));
        let promises = BTreeMap::from([(self.rank, (vote, self.accepted.clone()))]);
        Attempt { ballot, promises, proposed: None }
    }

    /// Begins the second phase once the first is complete.
    fn propose(&mut self, out: &mut Out) {
        let Some(attempt) = self.attempt.as_ref().filter(|a| a.proposed.is_none() && self.has_all(a)) else { return };
        let alive: BTreeSet<usize> = attempt.promises.keys().copied().filter(|&rank| !self.is_gone(rank)).collect();
        if !self.is_quorum(&alive) {
            self.missing = Some(self.missing(&alive));
            return;
        }
        let accepted = attempt.promises.values().filter_map(|(_, accepted)| accepted.as_ref());
        let outcome = match (accepted.max_by_key(|(ballot, _)| *ballot), &self.offer) {
            (Some((_, outcome)), _) => outcome.clone(),
            (None, None) => return,
            (None, Some(offer)) => {
                let votes = || alive.iter().filter_map(|rank| attempt.promises.get(rank)).map(|(vote, _)| vote);
                let newcomers: BTreeSet<u64> = votes().flat_map(|vote| &vote.newcomers).copied().collect();
                Outcome {
                    value: votes().fold(u64::MAX, |all, vote| all & vote.value),
                    alive: alive.iter().copied().collect(),
                    newcomers: newcomers.into_iter().take(MOST_NEWCOMERS).collect(),
                    offer: offer.clone(),
                }
            }
        };
        let ballot = attempt.ballot;
        let asked = alive.into_iter().filter(|&rank| rank != self.rank);
        out.extend(asked.map(|rank| (rank, Message::Accept { ballot, outcome: outcome.clone() })));
        self.accepted = Some((ballot, outcome.clone()));
        if let Some(attempt) = &mut self.attempt {
            attempt.proposed = Some((outcome, BTreeSet::from([self.rank])));
        }
    }

    /// Decides once the second phase is complete.
    fn conclude(&mut self, out: &mut Out) {
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| self.has_all(attempt)) else { return };
        let Some((outcome, accepted)) = &attempt.proposed else { return };
        if self.is_quorum(accepted) {
            let outcome = outcome.clone();
            self.decide(outcome, out);
        } else {
            self.missing = Some(self.missing(accepted));
        }
    }

    fn missing(&self, replied: &BTreeSet<usize>) -> Vec<usize> {
        (0..self.size).filter(|rank| !replied.contains(rank) && (self.strict || !self.dead.contains(rank))).collect()
    }
}

impl Attempt {
    /// True when `rank` has replied in this phase, or need not.
    fn has(&self, rank: usize) -> bool {
        match &self.proposed {
            None => self.promises.contains_key(&rank),
            // A member that came back after the first phase has made no promise.
            Some((_, accepted)) => accepted.contains(&rank) || !self.promises.contains_key(&rank),
        }
    }
}

#[cfg(test)]
#[path = "growth.rs"]
mod growth;
#[cfg(test)]
#[path = "model.rs"]
mod model;
