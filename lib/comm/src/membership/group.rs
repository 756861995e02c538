//! The agreements of one communicator: members run them one after another, at their own pace.

use std::collections::{BTreeMap, BTreeSet};

use super::agreement::{Agreement, Message, Out, Vote};

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

    /// Takes part in the next agreement ([`Agreement::call`]); returns the messages to send.
    pub(super) fn call(&mut self, vote: Vote, strict: bool) -> Out {
        let left_out = self.left_out();
        self.step(self.round, |agreement, out| {
            left_out.into_iter().for_each(|member| agreement.silent(member, out));
            agreement.call(vote, strict, out);
        })
    }

    /// The members that the last outcome left out. They take no part any more, as they find that outcome, and must not
    /// be awaited: one that was stopped may live again.
    fn left_out(&self) -> Vec<usize> {
        let last = self.round.checked_sub(1).and_then(|last| self.rounds.get(&last)?.decided());
        let out = |member: &usize| last.is_some_and(|outcome| !outcome.alive.contains(member));
        (0..self.members.len()).filter(out).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn vote() -> Vote {
        Vote { value: 1, newcomers: Vec::new() }
    }

    /// Rank 0 leads the group's next agreement with rank 1's replies.
    fn lead(group: &mut Group) -> Vec<usize> {
        let round = group.round;
        let ballot = |out: &Out| match out.iter().find(|(to, _)| *to == 1) {
            Some((_, Message::Prepare { ballot, .. } | Message::Accept { ballot, .. })) => *ballot,
            _ => panic!("nothing is asked of rank 1: {out:?}"),
        };
        let out = group.call(vote(), false);
        let promise = Message::Promise { ballot: ballot(&out), vote: vote(), accepted: None, dead: BTreeSet::new() };
        group.receive(round, 1, promise);
        let awaited = group.agreement(round).awaited();
        group.step(round, |agreement, out| agreement.silent(2, out));
        let out = group.step(round, |agreement, out| agreement.offer(Vec::new(), out));
        group.receive(round, 1, Message::Accepted { ballot: ballot(&out) });
        assert_eq!(group.agreement(round).decided().map(|outcome| outcome.alive.clone()), Some(vec![0, 1]));
        group.round += 1;
        awaited
    }

    #[test]
    fn a_member_that_was_left_out_is_not_awaited_again() {
        let mut group = Group::default();
        group.introduce(0, &[0, 1, 2]);
        assert_eq!(lead(&mut group), [2]);
        assert!(lead(&mut group).is_empty());
        // It finds what it missed.
        let out = group.receive(0, 2, Message::Waiting { dead: BTreeSet::new() });
        assert!(matches!(&out[..], [(2, Message::Decided { outcome })] if outcome.alive == [0, 1]), "{out:?}");
        assert!(lead(&mut group).is_empty());
    }
}
