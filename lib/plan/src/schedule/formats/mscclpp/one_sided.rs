//! Runs one-sided operations, and puts messages in their place.
//!
//! A vector clock per threadblock says which operations of the others it knows to be over: a `wait` joins the clock of
//! the `signal`, barriers and semaphores those of threadblocks of the rank. Then
//! - a write to another rank's memory is sent where it stands, and received by the first threadblock there that learns
//!   of it; as a packet, by the one that reads the packet;
//! - a read of another rank's memory is received where it stands, and sent by a threadblock there at its last operation
//!   that the reader knows of: the signal that it waited for. What it reads cannot have changed since;
//! - accesses that no clock orders are an error.

mod transfer;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use super::super::order;
use super::super::threads::{Cell, Thread, Threads};
use super::NAME;
use super::shorten::{Placed, shorten};
use crate::error::{Error, Result};

/// Blocked threadblocks that an error lists.
const LISTED: usize = 6;

/// Operations of a threadblock.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) id: usize,
    pub(super) actions: Vec<Action>,
}

#[derive(Debug)]
pub(super) struct Action {
    /// Place of the operation in the file.
    pub(super) number: usize,
    pub(super) kind: &'static str,
    pub(super) what: What,
}

/// A chunk of a rank's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    pub(super) rank: usize,
    pub(super) cell: Cell,
}

#[derive(Debug)]
pub(super) enum What {
    /// Adds one to counters that other ranks wait for.
    Signal { ends: Vec<usize>, relaxed: bool },
    /// Takes one from each counter.
    Wait { ends: Vec<usize>, relaxed: bool },
    /// Waits for so many threadblocks of the rank.
    Barrier { id: usize, blocks: usize },
    /// Adds one to semaphores of the rank.
    Release(Vec<usize>),
    /// Takes one from each semaphore.
    Acquire(Vec<usize>),
    /// Combines operands from left to right, and writes the result. Operands in `packets` are read as packets, results
    /// in `as_packets` are written as such.
    /// All of them have so many chunks, packets one.
    Combine { operands: Vec<Operand>, packets: Range<usize>, to: Vec<Operand>, as_packets: Range<usize>, count: usize },
}

/// Operations of all threadblocks that one of them knows to be done.
#[derive(Debug, Clone)]
struct Known {
    /// They are over.
    over: Rc<[u32]>,
    /// What they read may be overwritten: whatever depends on their data has come here, by a packet or a signal of any
    /// kind.
    read: Rc<[u32]>,
    /// They have begun.
    begun: Rc<[u32]>,
}

impl Known {
    fn join(&mut self, other: &Known, relaxed: bool) {
        if !relaxed {
            join(&mut self.over, &other.over);
        }
        join(&mut self.read, &other.read);
        join(&mut self.begun, &other.begun);
    }
}

fn join(ours: &mut Rc<[u32]>, theirs: &Rc<[u32]>) {
    if ours.iter().zip(&**theirs).any(|(ours, theirs)| theirs > ours) {
        *ours = ours.iter().zip(&**theirs).map(|(ours, theirs)| *ours.max(theirs)).collect();
    }
}

struct State {
    rank: usize,
    block: usize,
    action: usize,
    known: Known,
    /// Its knowledge after each operation.
    history: Vec<Rc<[u32]>>,
    /// Threadblocks that signalled to it, the latest one last.
    signalled: Vec<usize>,
    /// It has come to the barrier, and (`Some(true)`) the others have, too.
    barrier: Option<bool>,
}

struct Signal {
    from: usize,
    known: Known,
    relaxed: bool,
}

/// Memory of a chunk: who accessed it last, and when.
#[derive(Default)]
struct Memory {
    writer: Option<(usize, u32)>,
    readers: Vec<(usize, u32)>,
    /// Writes of other ranks that no threadblock of ours knows of yet.
    pending: Vec<usize>,
    /// A packet is there.
    packet: bool,
}

struct Put {
    message: usize,
    from: usize,
    time: u32,
    to: Operand,
    count: usize,
    packet: bool,
    /// Knowledge of its sender at that time.
    read: Rc<[u32]>,
}

struct Machine<'a> {
    plan: Threads,
    blocks: &'a [Vec<Block>],
    first: Vec<usize>,
    states: Vec<State>,
    counters: HashMap<usize, VecDeque<Signal>>,
    barriers: HashMap<(usize, usize), Vec<usize>>,
    semaphores: Vec<Vec<VecDeque<Option<Known>>>>,
    memory: Vec<Vec<Memory>>,
    puts: Vec<Put>,
    /// Writes that a rank does not know of yet, in their order.
    unknown: Vec<Vec<usize>>,
    /// Threadblocks that read a chunk as a packet: (rank, place).
    packet_readers: HashMap<(usize, usize), BTreeSet<usize>>,
    placed: Vec<Vec<Placed>>,
    /// Link of each message.
    links: Vec<Option<usize>>,
    /// Links: (sender, receiver, packets, number), with the latest put over each.
    conns: HashMap<(usize, usize, bool, usize), (usize, usize)>,
    next: usize,
}

/// The threadblocks with messages in the place of one-sided operations. `plan` has no threadblocks yet; `semaphores` are
/// those of each rank, with their first values.
pub(super) fn messages(plan: Threads, blocks: &[Vec<Block>], semaphores: Vec<Vec<usize>>) -> Result<Threads> {
    plan.check()?;
    let mut machine = Machine::new(plan, blocks, semaphores)?;
    loop {
        let (mut left, mut moved) = (false, false);
        for t in 0..machine.states.len() {
            if machine.action(t).is_some() {
                left = true;
                moved |= machine.step(t)?;
            }
        }
        if !left {
            return machine.end();
        }
        if !moved {
            return Err(machine.stuck());
        }
    }
}

impl<'a> Machine<'a> {
    fn new(plan: Threads, blocks: &'a [Vec<Block>], semaphores: Vec<Vec<usize>>) -> Result<Machine<'a>> {
        let count: usize = blocks.iter().map(Vec::len).sum();
        plan.fits(blocks.iter().flatten().map(|block| block.actions.len()).sum(), count)?;
        let nothing: Rc<[u32]> = vec![0; count].into();
        let (mut states, mut first, mut memory) = (vec![], vec![], vec![]);
        let mut packet_readers: HashMap<(usize, usize), BTreeSet<usize>> = HashMap::new();
        for (rank, of_rank) in blocks.iter().enumerate() {
            first.push(states.len());
            for (block, of_block) in of_rank.iter().enumerate() {
                let t = states.len();
                for action in &of_block.actions {
                    let What::Combine { operands, packets, to, count, .. } = &action.what else { continue };
                    for Operand { rank: of, cell } in operands.iter().chain(to) {
                        let chunks = plan.chunks(*of, cell.buf);
                        if cell.chunk.checked_add(*count).is_none_or(|end| end > chunks) {
                            let detail = format!("{} of rank {of}: there are {chunks}", cell.with(*count));
                            return Err(named(rank, of_block, action, &detail));
                        }
                    }
                    for operand in operands.get(packets.clone()).unwrap_or_default() {
                        let place = plan.place(operand.rank, operand.cell);
                        packet_readers.entry((operand.rank, place)).or_default().insert(t);
                    }
                }
                let [over, read, begun] = [(); 3].map(|()| Rc::clone(&nothing));
                let known = Known { over, read, begun };
                let (history, signalled) = (vec![], vec![]);
                states.push(State { rank, block, action: 0, known, history, signalled, barrier: None });
            }
            let segments = plan.shape.input_segments(rank) + plan.shape.output_segments(rank);
            memory.push((0..segments * plan.parts + plan.scratch[rank]).map(|_| Memory::default()).collect());
        }
        // A semaphore begins with so many releases.
        if let Some(value) = semaphores.iter().flatten().find(|value| **value > count) {
            return Err(Error::invalid(NAME, format!("a semaphore begins with {value}, expected at most {count}")));
        }
        let semaphores = semaphores.into_iter().map(|of_rank| {
            of_rank.into_iter().map(|value| (0..value).map(|_| None).collect::<VecDeque<_>>()).collect()
        });
        let ranks = blocks.len();
        Ok(Machine {
            plan,
            blocks,
            first,
            placed: (0..states.len()).map(|_| vec![]).collect(),
            states,
            counters: HashMap::new(),
            barriers: HashMap::new(),
            semaphores: semaphores.collect(),
            memory,
            puts: vec![],
            unknown: vec![vec![]; ranks],
            packet_readers,
            links: vec![],
            conns: HashMap::new(),
            next: 0,
        })
    }

    fn block(&self, t: usize) -> &'a Block {
        let State { rank, block, .. } = self.states[t];
        &self.blocks[rank][block]
    }

    fn action(&self, t: usize) -> Option<&'a Action> {
        self.block(t).actions.get(self.states[t].action)
    }

    fn wrong(&self, t: usize, action: &Action, detail: &str) -> Error {
        named(self.states[t].rank, self.block(t), action, detail)
    }

    fn stuck(&self) -> Error {
        let waiting = (0..self.states.len()).filter_map(|t| {
            let action = self.action(t)?;
            let State { rank, .. } = self.states[t];
            let cause = match &action.what {
                What::Wait { .. } => "a signal",
                What::Barrier { .. } => "other threadblocks",
                What::Acquire(_) => "a semaphore",
                _ => "a packet",
            };
            let place = format!("rank {rank}, threadblock {}, operation {}", self.block(t).id, action.number);
            Some(format!("{place} ({}) waits for {cause}", action.kind))
        });
        let mut waiting: Vec<String> = waiting.collect();
        if waiting.len() > LISTED {
            let more = waiting.len() - LISTED;
            waiting.truncate(LISTED);
            waiting.push(format!("and {more} more"));
        }
        Error::invalid(NAME, format!("deadlock: {}", waiting.join("; ")))
    }

    /// Takes the next operation, or a part of it; false: it has to wait.
    fn step(&mut self, t: usize) -> Result<bool> {
        let Some(action) = self.action(t) else { return Ok(false) };
        let rank = self.states[t].rank;
        match &action.what {
            What::Signal { ends, relaxed } => {
                self.begin(t);
                let known = self.states[t].known.clone();
                for &end in ends {
                    let signal = Signal { from: t, known: known.clone(), relaxed: *relaxed };
                    self.counters.entry(end).or_default().push_back(signal);
                }
            }
            What::Wait { ends, relaxed } => {
                let wanted = |end: &usize| ends.iter().filter(|other| *other == end).count();
                if ends.iter().any(|end| self.counters.get(end).map_or(0, VecDeque::len) < wanted(end)) {
                    return Ok(false);
                }
                self.begin(t);
                for end in ends {
                    let Some(signal) = self.counters.get_mut(end).and_then(VecDeque::pop_front) else { continue };
                    let state = &mut self.states[t];
                    state.known.join(&signal.known, *relaxed || signal.relaxed);
                    state.signalled.retain(|&other| other != signal.from);
                    state.signalled.push(signal.from);
                }
                self.learn(t);
            }
            What::Release(ids) => {
                self.begin(t);
                for &id in ids {
                    self.semaphores[rank][id].push_back(Some(self.states[t].known.clone()));
                }
            }
            What::Acquire(ids) => {
                let wanted = |id: &usize| ids.iter().filter(|other| *other == id).count();
                if ids.iter().any(|id| self.semaphores[rank][*id].len() < wanted(id)) {
                    return Ok(false);
                }
                self.begin(t);
                for &id in ids {
                    if let Some(Some(known)) = self.semaphores[rank][id].pop_front() {
                        self.states[t].known.join(&known, false);
                    }
                }
                self.learn(t);
            }
            &What::Barrier { id, blocks } => match self.states[t].barrier {
                None => {
                    self.begin(t);
                    self.states[t].barrier = Some(false);
                    let here = self.barriers.entry((rank, id)).or_default();
                    here.push(t);
                    if here.len() >= blocks {
                        let here = std::mem::take(here);
                        let mut all = self.states[t].known.clone();
                        here.iter().for_each(|&other| all.join(&self.states[other].known, false));
                        for other in here {
                            self.states[other].known = all.clone();
                            self.states[other].barrier = Some(true);
                        }
                    }
                    return Ok(true);
                }
                Some(false) => return Ok(false),
                Some(true) => {
                    self.states[t].barrier = None;
                    self.learn(t);
                }
            },
            What::Combine { operands, packets, to, as_packets, count } => {
                for operand in operands.get(packets.clone()).unwrap_or_default() {
                    let place = self.plan.place(operand.rank, operand.cell);
                    let memory = &self.memory[operand.rank][place];
                    if operand.rank != rank {
                        return Err(self.wrong(t, action, "reads packets in another rank's memory"));
                    }
                    if !memory.packet && !memory.pending.iter().any(|&put| self.puts[put].packet) {
                        return Ok(false);
                    }
                }
                self.begin(t);
                self.combine(t, action, [operands, to], [packets, as_packets], *count)?;
            }
        }
        let state = &mut self.states[t];
        state.history.push(Rc::clone(&state.known.over));
        state.action += 1;
        Ok(true)
    }

    /// Counts the operation.
    fn begin(&mut self, t: usize) {
        let state = &mut self.states[t];
        let now = state.action as u32 + 1;
        let counted = |clock: &Rc<[u32]>| {
            let mut clock = clock.to_vec();
            clock[t] = now;
            clock.into()
        };
        let Known { over, read, begun } = &state.known;
        state.known = Known { over: counted(over), read: counted(read), begun: counted(begun) };
    }

    fn now(&self, t: usize) -> u32 {
        self.states[t].known.over[t]
    }

    fn knows(&self, t: usize, &(other, time): &(usize, u32)) -> bool {
        other == t || self.states[t].known.over[other] >= time
    }

    /// Returns true if what a threadblock read then may be overwritten.
    fn knows_read(&self, t: usize, &(other, time): &(usize, u32)) -> bool {
        other == t || self.states[t].known.read[other] >= time
    }

    /// Receives what other ranks wrote and `t` now knows of.
    fn learn(&mut self, t: usize) {
        let rank = self.states[t].rank;
        let known = |&put: &usize| {
            let put = &self.puts[put];
            !put.packet && self.knows(t, &(put.from, put.time))
        };
        let puts: Vec<usize> = self.unknown[rank].iter().copied().filter(known).collect();
        puts.into_iter().for_each(|put| self.deliver(t, put));
    }

    fn end(mut self) -> Result<Threads> {
        if let Some(put) = self.unknown.iter().flatten().min().map(|&put| &self.puts[put]) {
            let state = &self.states[put.from];
            let block = &self.blocks[state.rank][state.block];
            let how = if put.packet { "reads the packet" } else { "waits for a signal behind it" };
            let detail = format!("writes {} of rank {}, which never {how}", put.to.cell, put.to.rank);
            let action = &block.actions[put.time as usize - 1];
            return Err(named(state.rank, block, action, &detail));
        }
        let links = std::mem::take(&mut self.links);
        let linked = |message: usize| links.get(message).copied().flatten().ok_or(());
        for placed in self.placed.iter_mut().flatten() {
            let step = placed.op.step.map(|step| step.map(linked, |cell| cell));
            placed.op.step = step.and_then(Result::ok);
        }
        let mut sequence = Vec::new();
        let mut placed = std::mem::take(&mut self.placed).into_iter();
        for (rank, blocks) in self.blocks.iter().enumerate() {
            let mut threads: Vec<Vec<Placed>> = placed.by_ref().take(blocks.len()).collect();
            threads.iter_mut().for_each(|ops| ops.sort_by_key(|op| (op.position, op.sequence)));
            shorten(&self.plan, rank, &mut threads);
            let mut of_rank = Vec::new();
            for (block, (file, ops)) in blocks.iter().zip(threads).enumerate() {
                sequence.extend(ops.iter().enumerate().map(|(at, op)| (op.sequence, (rank, block, at))));
                of_rank.push(Thread { id: file.id, ops: ops.into_iter().map(|placed| placed.op).collect() });
            }
            self.plan.ranks.push(of_rank);
        }
        sequence.sort_unstable();
        let sequence: Vec<_> = sequence.into_iter().map(|(_, at)| at).collect();
        order::depend(&mut self.plan, &sequence)?;
        Ok(self.plan)
    }
}

fn named(rank: usize, block: &Block, action: &Action, detail: &str) -> Error {
    let Action { number, kind, .. } = action;
    Error::invalid(NAME, format!("rank {rank}, threadblock {}, operation {number} ({kind}): {detail}", block.id))
}
