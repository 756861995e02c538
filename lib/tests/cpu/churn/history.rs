//! Amounts that a rank adds to the weights in a step, and the weights that a history of groups must have led to.

use std::collections::HashMap;

/// Elements of a call, by step.
pub(super) const LENGTHS: [usize; 3] = [100, 3000, 50_000];
/// Number of weights.
pub(super) const WEIGHTS: usize = LENGTHS[2];

/// Knuth's multiplier and a shift: what looks random, the same for the same input.
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 29).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    value ^ value >> 32
}

/// Amount that process `number` adds to the first weight in `step`; to weight i it adds (i + 1) times as much.
pub(super) fn part(number: u64, step: u64) -> u64 {
    mix(mix(number) ^ step) % (1 << 20)
}

/// Elements of the call of `step`.
pub(super) fn length(step: u64) -> usize {
    LENGTHS[(step % 3) as usize]
}

pub(super) fn hash(weights: &[u64]) -> u64 {
    weights.iter().fold(0xcbf2_9ce4_8422_2325, |hash, weight| (hash ^ weight).wrapping_mul(0x100_0000_01b3))
}

/// Sum of what the steps have added to the first weight, by the length of their calls.
type Sums = [u64; 3];

fn hash_of(sums: Sums) -> u64 {
    let weight = |i: usize| {
        let sum = (0..3).filter(|&kind| i < LENGTHS[kind]).fold(0, |sum: u64, kind| sum.wrapping_add(sums[kind]));
        sum.wrapping_mul(i as u64 + 1)
    };
    hash(&(0..WEIGHTS).map(weight).collect::<Vec<_>>())
}

/// One group, as each of its ranks reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Era {
    /// Its first step.
    pub(super) start: u64,
    /// Hash of the weights before that.
    pub(super) hash: u64,
    /// The group from which they come; 0: of no group, all of them 0.
    pub(super) from: u64,
    /// Numbers of its processes, by rank.
    pub(super) members: Vec<u64>,
}

/// Groups by number, which is random.
#[derive(Default)]
pub(super) struct History {
    pub(super) eras: HashMap<u64, Era>,
    /// Beginning of the groups whose weights are checked.
    sums: HashMap<u64, Sums>,
}

impl History {
    /// Notes a rank's report.
    pub(super) fn note(&mut self, number: u64, era: Era) -> Result<(), String> {
        match self.eras.insert(number, era.clone()) {
            Some(other) if other != era => Err(format!("two reports of one group differ: {other:?} and {era:?}")),
            _ => Ok(()),
        }
    }

    /// The right hash of the weights of group `number` before `step`, computed from the members of all groups before.
    /// Every group before it must have been reported.
    pub(super) fn hash_before(&mut self, number: u64, step: u64) -> Result<u64, String> {
        self.sums_before(number, step).map(hash_of)
    }

    fn sums_before(&mut self, number: u64, step: u64) -> Result<Sums, String> {
        let era = self.eras.get(&number).ok_or_else(|| format!("no rank has reported group {number}"))?.clone();
        let mut sums = match self.sums.get(&number) {
            Some(sums) => *sums,
            None if era.from == 0 => Sums::default(),
            None => self.sums_before(era.from, era.start)?,
        };
        if self.sums.insert(number, sums).is_none() && hash_of(sums) != era.hash {
            return Err(format!("the weights with which group {number} began are wrong: {era:?}"));
        }
        for step in era.start..step {
            let added = era.members.iter().fold(0, |sum: u64, &member| sum.wrapping_add(part(member, step)));
            let sum = &mut sums[(step % 3) as usize];
            *sum = sum.wrapping_add(added);
        }
        Ok(sums)
    }
}
