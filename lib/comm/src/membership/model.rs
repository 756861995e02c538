//! Explicit-state model checker of the agreement: every order of calls, messages, deaths and notices of deaths.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Agreement, Message, Out, Outcome, Vote};

/// Members, and the faults that may happen.
#[derive(Clone, Copy)]
struct Case {
    ranks: usize,
    crashes: usize,
    /// A member that others may take for gone although it lives, and how many times.
    suspect: Option<(usize, usize)>,
    /// Messages between two members keep their order, as over the library's own connections.
    fifo: bool,
    /// Members call at any time; else all of them at the beginning.
    late: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    members: Vec<Agreement>,
    called: Vec<bool>,
    crashed: BTreeSet<usize>,
    /// Messages under way.
    net: Vec<(usize, usize, Message)>,
    suspicions: usize,
    /// Every outcome that a member has decided, also of members that have crashed.
    decided: Option<Outcome>,
}

/// The vote of a member, which it alone has.
fn vote(rank: usize) -> Vote {
    Vote { value: !(1 << rank), newcomers: vec![7, 100 + rank as u64] }
}

impl World {
    fn new(case: Case) -> World {
        let members = (0..case.ranks).map(|rank| {
            let mut one = Agreement::new(rank, case.ranks, BTreeSet::new());
            one.offer(vec![rank as u8], &mut Out::new());
            one
        });
        let mut world = World {
            members: members.collect(),
            called: vec![false; case.ranks],
            crashed: BTreeSet::new(),
            net: Vec::new(),
            suspicions: 0,
            decided: None,
        };
        if !case.late {
            (0..case.ranks).for_each(|rank| world.act(rank, |one, out| one.call(vote(rank), false, out)));
            world.called.fill(true);
        }
        world
    }

    fn lives(&self, rank: usize) -> bool {
        !self.crashed.contains(&rank)
    }

    /// One input of a member, and its messages.
    fn act(&mut self, rank: usize, input: impl FnOnce(&mut Agreement, &mut Out)) {
        let mut out = Out::new();
        input(&mut self.members[rank], &mut out);
        let crashed = &self.crashed;
        let sent = out.into_iter().filter(|(to, _)| !crashed.contains(to)).map(|(to, message)| (rank, to, message));
        self.net.extend(sent);
        // Stable: the messages of a pair keep their order.
        self.net.sort_by_key(|(from, to, _)| (*from, *to));
        if let Some(outcome) = self.members[rank].decided().cloned() {
            let first = self.decided.get_or_insert_with(|| outcome.clone());
            assert_eq!(*first, outcome, "two outcomes");
        }
    }

    /// The states that follow, and whether one of them is bound to come: messages of the dead may be lost.
    fn next(&self, case: Case) -> (Vec<World>, bool) {
        let (mut all, mut fair) = (Vec::new(), false);
        let mut add = |certain: bool, step: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            step(&mut world);
            fair |= certain;
            all.push(world);
        };
        for (at, (from, to, message)) in self.net.iter().enumerate() {
            let pair = |(from, to, _): &(usize, usize, Message)| (*from, *to);
            let before = self.net[..at].iter().filter(|other| pair(other) == (*from, *to));
            if before.clone().count() > 0 && case.fifo || before.clone().any(|other| other.2 == *message) {
                continue;
            }
            add(self.lives(*from), &|world| {
                world.net.remove(at);
                world.act(*to, |one, out| one.receive(*from, message.clone(), out));
            });
        }
        for rank in (0..case.ranks).filter(|&rank| self.lives(rank)) {
            if !self.called[rank] {
                add(true, &|world| {
                    world.called[rank] = true;
                    world.act(rank, |one, out| one.call(vote(rank), false, out));
                });
            }
            for &dead in self.crashed.iter().filter(|dead| !self.members[rank].proven().contains(dead)) {
                add(true, &|world| world.act(rank, |one, out| one.dead(dead, out)));
            }
            let suspect = case.suspect.filter(|&(suspect, times)| suspect != rank && self.suspicions < times);
            if let Some((suspect, _)) = suspect.filter(|(s, _)| !self.members[rank].silent.contains(s)) {
                add(false, &|world| {
                    world.suspicions += 1;
                    world.act(rank, |one, out| one.silent(suspect, out));
                });
            }
            if self.crashed.len() < case.crashes {
                add(false, &|world| {
                    world.crashed.insert(rank);
                    world.net.retain(|(_, to, _)| *to != rank);
                });
            }
        }
        (all, fair)
    }

    /// Uniform agreement is checked where a member decides; here validity and, where nothing more is bound to happen,
    /// termination.
    fn check(&self, case: Case, fair: bool) {
        if let Some(Outcome { value, alive, newcomers, offer }) = &self.decided {
            assert_eq!(
                *value,
                alive.iter().fold(u64::MAX, |all, rank| all & !(1 << rank)),
                "values of the living alone"
            );
            let all = std::iter::once(7).chain(alive.iter().map(|&rank| 100 + rank as u64));
            assert!(newcomers.iter().copied().eq(all), "newcomers of the living alone: {newcomers:?}");
            assert!(alive.iter().all(|&rank| self.called[rank]) && alive.contains(&usize::from(offer[0])));
            let missing = (0..case.ranks).filter(|rank| !alive.contains(rank));
            let gone =
                |rank: usize| self.crashed.contains(&rank) || case.suspect.is_some_and(|(suspect, _)| suspect == rank);
            assert!(missing.into_iter().all(gone), "a member that lives was left out: {alive:?}");
        }
        if fair || case.suspect.is_some() {
            return;
        }
        for rank in (0..case.ranks).filter(|&rank| self.lives(rank)) {
            assert!(self.members[rank].decided().is_some(), "rank {rank} waits for ever: {:#?}", self.members);
        }
    }
}

/// Explores all states; returns their number.
fn explore(case: Case) -> usize {
    let key = |world: &World| {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        hasher.finish()
    };
    let start = World::new(case);
    let mut seen = HashSet::from([key(&start)]);
    let mut queue = VecDeque::from([start]);
    while let Some(world) = queue.pop_front() {
        let (next, fair) = world.next(case);
        world.check(case, fair);
        queue.extend(next.into_iter().filter(|world| seen.insert(key(world))));
    }
    seen.len()
}

const CALM: Case = Case { ranks: 3, crashes: 0, suspect: None, fifo: false, late: true };

#[test]
fn one_outcome_without_faults() {
    for ranks in 1..=3 {
        explore(Case { ranks, ..CALM });
    }
    explore(Case { ranks: 4, fifo: true, ..CALM });
}

#[test]
fn one_outcome_whoever_dies_and_whenever() {
    explore(Case { ranks: 2, crashes: 1, ..CALM });
    explore(Case { crashes: 2, ..CALM });
}

#[test]
fn one_outcome_of_four_of_which_one_dies() {
    explore(Case { ranks: 4, crashes: 1, fifo: true, late: false, ..CALM });
}

/// Takes two and a half minutes: 1.6 million states.
#[test]
#[ignore = "slow"]
fn one_outcome_of_four_of_which_two_die() {
    explore(Case { ranks: 4, crashes: 2, fifo: true, late: false, ..CALM });
}

#[test]
fn one_outcome_though_a_member_that_lives_is_taken_for_gone() {
    for suspect in 0..2 {
        explore(Case { suspect: Some((suspect, 1)), ..CALM });
        explore(Case { suspect: Some((suspect, 2)), fifo: true, late: false, ..CALM });
    }
}

/// Takes half a minute for each member.
#[test]
#[ignore = "slow"]
fn one_outcome_though_one_dies_and_another_is_taken_for_gone() {
    for suspect in 0..3 {
        explore(Case { crashes: 1, suspect: Some((suspect, 2)), fifo: true, late: false, ..CALM });
    }
}

#[test]
fn a_ballot_of_any_size_is_no_overflow() {
    let (mut member, mut out) = (super::Agreement::new(1, 3, BTreeSet::new()), Out::new());
    member.call(vote(1), false, &mut out);
    member.receive(0, Message::Prepare { ballot: u64::MAX, dead: BTreeSet::new() }, &mut out);
    member.silent(0, &mut out);
    assert!(matches!(out.last(), Some((2, Message::Prepare { ballot: u64::MAX, .. }))), "{out:?}");
}

#[test]
fn an_outcome_has_room_for_so_many_newcomers() {
    let (mut member, mut out) = (Agreement::new(0, 1, BTreeSet::new()), Out::new());
    member.offer(Vec::new(), &mut out);
    member.call(Vote { value: 0, newcomers: (0..1000).rev().collect() }, false, &mut out);
    assert_eq!(member.decided().unwrap().newcomers, (0..super::MOST_NEWCOMERS as u64).collect::<Vec<_>>());
}
