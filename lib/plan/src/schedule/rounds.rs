//! A schedule played in rounds, for pictures: in each round every lane receives at most one message, sent in an earlier
//! round, and sends at most one. Local steps cost no round.
//!
//! Real ranks do not move in step, but each lane's order of steps and its results are the same.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::verify::{VerifyError, verify};
use super::{Buf, Loc, Program, Shape, Step};

/// The content of a location: the combination of some ranks' inputs at one position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The segment of those inputs.
    pub segment: usize,
    /// The ranks of the inputs, sorted.
    pub ranks: Vec<usize>,
}

/// The content of one rank's memory, by segment and part: `[segment * parts + part]`; `None` where nothing was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// The send buffer (in an in-place call: only the segments that are not the output too).
    pub input: Vec<Option<Piece>>,
    /// The receive buffer.
    pub output: Vec<Option<Piece>>,
    /// The executor's.
    pub scratch: Vec<Option<Piece>>,
}

/// A message in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// The channel.
    pub channel: u32,
    /// The parts it carries.
    pub parts: Range<usize>,
    /// Their content.
    pub pieces: Vec<Option<Piece>>,
}

/// One round.
#[derive(Debug, Clone, Default)]
pub struct Round {
    /// Steps taken: (rank, lane, step).
    pub steps: Vec<(usize, usize, Step)>,
    /// Messages sent in it; they can be received from the next round on.
    pub sent: Vec<Message>,
    /// All ranks' memory after it.
    pub memory: Vec<Memory>,
}

/// Verifies the programs of all ranks, and plays one window of them, in place where the collective has such a form. The
/// first element of the result is the state before the first round, without steps.
///
/// # Errors
/// As [`verify`].
pub fn play(programs: &[Program], shape: &Shape) -> Result<Vec<Round>, VerifyError> {
    verify(programs, shape, 2, 1, true)?;
    let mut player = Player::new(programs, shape);
    let mut rounds = vec![Round { memory: player.memory.clone(), ..Round::default() }];
    while !player.is_done() {
        let round = player.round();
        if round.steps.is_empty() {
            return Err(VerifyError::Programs("the ranks wait for each other".to_owned()));
        }
        rounds.push(round);
    }
    Ok(rounds)
}

struct Player<'a> {
    programs: &'a [Program],
    /// Per rank and lane: the next step.
    next: Vec<Vec<usize>>,
    memory: Vec<Memory>,
    /// Per rank: the input segment that is an output segment.
    same: Vec<Option<(usize, usize)>>,
    /// By (channel, from, to).
    links: BTreeMap<(u32, usize, usize), VecDeque<Message>>,
}

impl<'a> Player<'a> {
    fn new(programs: &'a [Program], shape: &Shape) -> Player<'a> {
        let mut same = Vec::new();
        let mut memory = Vec::new();
        for (rank, program) in programs.iter().enumerate() {
            let parts = program.parts;
            let own = |segment| Some(Piece { segment, ranks: vec![rank] });
            let mut ours = Memory {
                input: (0..shape.input_segments(rank) * parts).map(|at| own(at / parts)).collect(),
                output: vec![None; shape.output_segments(rank) * parts],
                scratch: vec![None; program.scratch_segments * parts],
            };
            let pair = shape.in_place(rank);
            if let Some((from, to)) = pair {
                for part in 0..parts {
                    ours.output[to * parts + part] = ours.input[from * parts + part].take();
                }
            }
            same.push(pair);
            memory.push(ours);
        }
        let next = programs.iter().map(|p| vec![0; p.lanes.len()]).collect();
        Player { programs, next, memory, same, links: BTreeMap::new() }
    }

    fn is_done(&self) -> bool {
        self.programs
            .iter()
            .zip(&self.next)
            .all(|(program, next)| program.lanes.iter().zip(next).all(|(lane, &at)| at == lane.steps.len()))
    }

    fn place(&self, rank: usize, loc: Loc, part: usize) -> (Buf, usize) {
        let parts = self.programs[rank].parts;
        let segment = loc.segment as usize;
        match (loc.buf, self.same[rank]) {
            (Buf::Input, Some((from, to))) if from == segment => (Buf::Output, to * parts + part),
            (buf, _) => (buf, segment * parts + part),
        }
    }

    fn at(&mut self, rank: usize, loc: Loc, part: usize) -> &mut Option<Piece> {
        let (buf, index) = self.place(rank, loc, part);
        let memory = &mut self.memory[rank];
        match buf {
            Buf::Input => &mut memory.input[index],
            Buf::Output => &mut memory.output[index],
            Buf::Scratch => &mut memory.scratch[index],
        }
    }

    fn round(&mut self) -> Round {
        let mut round = Round::default();
        for rank in 0..self.programs.len() {
            for lane in 0..self.programs[rank].lanes.len() {
                self.advance(rank, lane, &mut round);
            }
        }
        for message in &round.sent {
            let link = self.links.entry((message.channel, message.from, message.to)).or_default();
            link.push_back(message.clone());
        }
        round.memory = self.memory.clone();
        round
    }

    /// Takes steps until it would receive or send a second time.
    fn advance(&mut self, rank: usize, lane: usize, round: &mut Round) {
        let program = &self.programs[rank];
        let channel = program.lanes[lane].channel;
        let (mut received, mut sent) = (false, false);
        while let Some(&step) = program.lanes[lane].steps.get(self.next[rank][lane]) {
            if (received && step.source().is_some()) || (sent && step.destination().is_some()) {
                return;
            }
            let arrived = match step.source() {
                Some(from) => match self.links.get_mut(&(channel, from, rank)).and_then(VecDeque::pop_front) {
                    Some(message) => Some(message),
                    None => return,
                },
                None => None,
            };
            received |= arrived.is_some();
            sent |= step.destination().is_some();
            let parts = step.parts();
            let pieces: Vec<Option<Piece>> =
                parts.clone().map(|part| self.take_step(rank, step, arrived.as_ref(), part)).collect();
            if let Some(to) = step.destination() {
                round.sent.push(Message { from: rank, to, channel, parts, pieces });
            }
            round.steps.push((rank, lane, step));
            self.next[rank][lane] += 1;
        }
    }

    /// One part of a step; returns its result.
    fn take_step(&mut self, rank: usize, step: Step, arrived: Option<&Message>, part: usize) -> Option<Piece> {
        let came = arrived.and_then(|m| m.pieces.get(part - m.parts.start).cloned().flatten());
        let ours = step.read().and_then(|loc| self.at(rank, loc, part).clone());
        let result = match step {
            Step::Reduce { dst, .. } => combine(self.at(rank, dst, part).clone(), ours),
            _ => combine(came, ours),
        };
        if let Some(dst) = step.write() {
            *self.at(rank, dst, part) = result.clone();
        }
        result
    }
}

fn combine(a: Option<Piece>, b: Option<Piece>) -> Option<Piece> {
    let (mut a, b) = match (a, b) {
        (Some(a), Some(b)) => (a, b),
        (one, other) => return one.or(other),
    };
    a.ranks.extend(b.ranks);
    a.ranks.sort_unstable();
    Some(a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{program, supports};
    use crate::wire::{Algorithm, Collective};

    fn played(algorithm: Algorithm, collective: Collective, ranks: usize) -> (Shape, Vec<Round>) {
        let shape = Shape { collective, ranks, root: ranks - 1, channels: 1 };
        let programs: Vec<_> = (0..ranks).map(|r| program(algorithm, &shape, r).unwrap()).collect();
        (shape, play(&programs, &shape).unwrap())
    }

    #[test]
    fn a_ring_takes_two_trips_and_a_tree_two_ways() {
        // The last round only receives.
        assert_eq!(played(Algorithm::Ring, Collective::AllReduce, 4).1.len() - 1, 2 * 3 + 1);
        assert_eq!(played(Algorithm::RecursiveDoubling, Collective::AllReduce, 8).1.len() - 1, 3 + 1);
    }

    #[test]
    fn every_schedule_ends_with_what_its_collective_promises() {
        for algorithm in Algorithm::ALL {
            for collective in Collective::ALL {
                for ranks in [2, 3, 4, 7, 8] {
                    let shape = Shape { collective, ranks, root: ranks - 1, channels: 1 };
                    if !supports(algorithm, &shape) || program(algorithm, &shape, 0).is_none() {
                        continue;
                    }
                    let (shape, rounds) = played(algorithm, collective, ranks);
                    for (rank, memory) in rounds.last().unwrap().memory.iter().enumerate() {
                        let parts = memory.output.len() / shape.output_segments(rank).max(1);
                        for (at, piece) in memory.output.iter().enumerate() {
                            let (place, piece) = (at / parts, piece.as_ref().unwrap());
                            let (segment, from) = shape.result(rank, place).unwrap();
                            let expected = (segment, from.collect::<Vec<_>>());
                            assert_eq!(
                                (piece.segment, piece.ranks.clone()),
                                expected,
                                "{algorithm} {collective} {ranks} {rank}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn programs_that_are_wrong_are_not_played() {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, root: 0, channels: 1 };
        let one = program(Algorithm::Ring, &shape, 0).unwrap();
        assert!(play(&[one.clone(), one], &shape).is_err());
    }
}
