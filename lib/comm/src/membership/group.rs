//! The agreements of one communicator: members run them one after another, at their own pace.

use std::collections::{BTreeMap, BTreeSet};

use super::agreement::{Agreement, Message, Out};

/// Agreements that are kept: a member that missed an outcome asks for it.
const KEPT: usize = 8;
/// Messages that are kept for a communicator on which this rank has not run an agreement.
const EARLY: usize = 4096;

/// One communicator's agreements.
#[derive(Default)]
pub(super) struct Group {
    /// World rank by rank; empty until this rank runs an agreement.
    members: Vec<usize>,
    rank: usize,
    /// Number of our next agreement.
    pub(super) round: u64,
    rounds: BTreeMap<u64, Agreement>,
    dead: BTreeSet<usize>,
    /// Messages that came before this rank's first call: round, sender in the world, message.
    early: Vec<(u64, usize, Message)>,
}

impl Group {
    /// Sets the members; true the first time.
    pub(super) fn introduce(&mut self, rank: usize, members: &[usize]) -> bool {
        let new = self.members.is_empty();
        if new {
            (self.rank, self.members) = (rank, members.to_vec());
        }
        new
    }

    /// The members, once they are known.
    pub(super) fn members(&self) -> Option<&[usize]> {
        Some(self.members.as_slice()).filter(|members| !members.is_empty())
    }

    /// Keeps a message until the members are known.
    pub(super) fn keep(&mut self, round: u64, from: usize, message: Message) {
        if self.early.len() < EARLY {
            self.early.push((round, from, message));
        }
    }

    pub(super) fn take_early(&mut self) -> Vec<(u64, usize, Message)> {
        std::mem::take(&mut self.early)
    }

    /// The agreement of a round.
    pub(super) fn agreement(&mut self, round: u64) -> &mut Agreement {
        let (rank, size, dead) = (self.rank, self.members.len(), &self.dead);
        self.rounds.entry(round).or_insert_with(|| Agreement::new(rank, size, dead.clone()))
    }

    /// One input of a round; returns the messages to send.
    pub(super) fn step(&mut self, round: u64, input: impl FnOnce(&mut Agreement, &mut Out)) -> Out {
        let mut out = Out::new();
        let agreement = self.agreement(round);
        input(agreement, &mut out);
        let proven = agreement.proven().clone();
        self.dead.extend(proven);
        while self.rounds.len() > KEPT && self.rounds.keys().next().is_some_and(|&first| first < self.round) {
            self.rounds.pop_first();
        }
        out
    }

    /// A message of member `from`.
    pub(super) fn receive(&mut self, round: u64, from: usize, message: Message) -> Out {
        if !self.rounds.contains_key(&round) && round < self.round {
            // Forgotten. A member that is so far behind is one that the others went on without.
            let without = |one: &&Agreement| one.decided().is_some_and(|outcome| !outcome.alive.contains(&from));
            let outcome = self.rounds.values().rev().find(without).and_then(Agreement::decided);
            return outcome.map(|outcome| (from, Message::Decided { outcome: outcome.clone() })).into_iter().collect();
        }
        self.step(round, |agreement, out| agreement.receive(from, message, out))
    }
}
