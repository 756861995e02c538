//! Uniform agreement on who lives, small enough to write by hand. No I/O, no clock, no thread: events go in, messages
//! come out, so that a test can run every order of them (`model.rs`).
//!
//! It assumes less than it may: a rank that is reported dead is dead, and every death is reported to every rank that
//! lives, some time. Messages of ranks that live arrive, in any order and as late as they like; those of a rank that
//! has died arrive or not, also after the news of its death. The library's own agreement
//! (`lib/comm/src/membership/agreement.rs`) can take a rank that lives for gone as well, which costs it ballots and
//! quorums.

#[cfg(test)]
pub(crate) mod model;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

/// Result of an agreement: the same on every rank that has one, also on those that died since.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// Bitwise AND of the votes of `alive`.
    pub value: u64,
    /// Ranks whose votes count: every rank that lives, and perhaps some that died meanwhile.
    pub alive: BTreeSet<usize>,
}

/// Message between two ranks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Message {
    /// The sender's vote.
    Vote(u64),
    /// The sender leads, and proposes this outcome.
    Propose(Outcome),
    /// The sender has accepted the receiver's proposal.
    Accepted,
    /// This outcome is decided.
    Decided(Outcome),
}

/// One thing that happens to a rank. `M` is the kind of message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event<M = Message> {
    /// The program calls, once: the rank takes part from now on. Messages and news of deaths may come before.
    Call,
    /// A message of rank `from`.
    Message {
        /// The sender.
        from: usize,
        /// The message.
        message: M,
    },
    /// This rank is dead, which is certain. Comes once for each.
    Died(usize),
}

/// Messages to send: the receiver and the message.
pub type Out<M = Message> = Vec<(usize, M)>;

/// One rank's state. The fields are those of our solution, and free to change.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Member {
    /// Our number.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Our vote.
    pub value: u64,
    /// The program has called.
    pub called: bool,
    /// The ranks that are known to be dead.
    pub dead: BTreeSet<usize>,
    /// The leader that has our vote.
    pub followed: Option<usize>,
    /// As a leader: the votes so far.
    pub votes: BTreeMap<usize, u64>,
    /// The newest outcome that we have accepted, of another leader or of our own.
    pub accepted: Option<Outcome>,
    /// As a leader that has proposed: the ranks that have accepted.
    pub acks: Option<BTreeSet<usize>>,
    /// As a leader: the decision was sent to the others.
    pub told: bool,
    /// The outcome, once it is decided: it never changes again.
    pub decided: Option<Outcome>,
}

impl Member {
    /// Rank `rank` of `size`, which votes for `value` when its program calls.
    pub fn new(rank: usize, size: usize, value: u64) -> Member {
        Member {
            rank,
            size,
            value,
            called: false,
            dead: BTreeSet::new(),
            followed: None,
            votes: BTreeMap::new(),
            accepted: None,
            acks: None,
            told: false,
            decided: None,
        }
    }

    /// The ranks that are not known to be dead, in order. Ours is among them.
    pub fn living(&self) -> Vec<usize> {
        (0..self.size).filter(|rank| !self.dead.contains(rank)).collect()
    }

    /// Takes one event, and adds the messages to send to `out`. Sets `decided` when there is an outcome.
    // EXERCISE 5 (Agree by hand): note what the event says, then do whatever has become possible. The lowest rank that
    // lives leads. A rank may decide only when no other one can come to another outcome any more, whichever die next.
    pub fn step(&mut self, event: Event, out: &mut Out) {
        match event {
            Event::Call => self.called = true,
            Event::Died(rank) => {
                self.dead.insert(rank);
            }
            Event::Message { from, message } => match message {
                Message::Vote(value) => {
                    self.votes.insert(from, value);
                }
                // Our vote for the next leader was a promise to accept nothing more of this one.
                Message::Propose(_) if self.dead.contains(&from) => {}
                Message::Propose(outcome) => {
                    self.accepted = Some(outcome);
                    out.push((from, Message::Accepted));
                }
                Message::Accepted => {
                    if let Some(acks) = &mut self.acks {
                        acks.insert(from);
                    }
                }
                Message::Decided(outcome) => {
                    self.decided.get_or_insert(outcome);
                }
            },
        }
        if !self.called {
            return;
        }
        let living = self.living();
        let leader = living.first().copied().unwrap_or(self.rank);
        if leader != self.rank {
            if self.followed != Some(leader) {
                self.followed = Some(leader);
                out.push((leader, Message::Vote(self.value)));
            }
            return;
        }
        let others = || living.iter().copied().filter(|&rank| rank != self.rank);
        self.votes.insert(self.rank, self.value);
        if self.acks.is_none() && living.iter().all(|rank| self.votes.contains_key(rank)) {
            // An earlier leader may have decided what we have accepted, and be dead.
            let outcome = self.accepted.clone().unwrap_or_else(|| Outcome {
                value: living.iter().fold(u64::MAX, |all, rank| all & self.votes[rank]),
                alive: living.iter().copied().collect(),
            });
            out.extend(others().map(|rank| (rank, Message::Propose(outcome.clone()))));
            self.accepted = Some(outcome);
            self.acks = Some(BTreeSet::from([self.rank]));
        }
        let complete = self.acks.as_ref().is_some_and(|acks| living.iter().all(|rank| acks.contains(rank)));
        if let Some(outcome) = self.accepted.clone().filter(|_| complete && !self.told) {
            self.told = true;
            out.extend(others().map(|rank| (rank, Message::Decided(outcome.clone()))));
            self.decided = Some(outcome);
        }
    }
}
