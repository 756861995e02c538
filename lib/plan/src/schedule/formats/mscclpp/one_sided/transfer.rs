//! What an access to memory is as steps: a step of ours, a message that is sent here and received there, or the other
//! way round.

use std::ops::Range;
use std::rc::Rc;

use super::{Action, Machine, Memory, Operand, Put, join};
use crate::error::Result;
use crate::schedule::formats::mscclpp::shorten::Placed;
use crate::schedule::formats::threads::{Cell, Conn, Op};
use crate::schedule::{Buf, Step};

impl Machine<'_> {
    pub(super) fn deliver(&mut self, t: usize, at: usize) {
        let Put { message, from, to, count, packet, .. } = self.puts[at];
        self.unknown[to.rank].retain(|&put| put != at);
        self.connect(message, from, t, packet, at);
        let read = Rc::clone(&self.puts[at].read);
        join(&mut self.states[t].known.read, &read);
        self.place(t, self.states[t].action, Step::Recv { from: message, dst: to.cell }, count);
        let now = (t, self.now(t));
        for cell in cells(to.cell, count) {
            let place = self.plan.place(to.rank, cell);
            let memory = &mut self.memory[to.rank][place];
            memory.pending.retain(|&put| put != at);
            (memory.writer, memory.readers, memory.packet) = (Some(now), vec![], memory.packet || packet);
        }
    }

    /// Gives a message its link. A put that is older than the latest one over a link takes another.
    fn connect(&mut self, message: usize, from: usize, to: usize, packets: bool, put: usize) {
        let mut number = 0;
        while self.conns.get(&(from, to, packets, number)).is_some_and(|&(_, latest)| latest > put) {
            number += 1;
        }
        let place = |t: usize| (self.states[t].rank, self.states[t].block);
        let conns = &mut self.plan.conns;
        let conn = self.conns.entry((from, to, packets, number)).or_insert_with(|| {
            conns.push(Conn { from: place(from), to: place(to) });
            (conns.len() - 1, put)
        });
        conn.1 = put;
        self.links[message] = Some(conn.0);
    }

    fn message(&mut self) -> usize {
        self.links.push(None);
        self.links.len() - 1
    }

    /// Adds a step at an operation of a threadblock, behind all others there.
    fn place(&mut self, t: usize, position: usize, step: Step<usize, Cell>, count: usize) {
        let action = &self.block(t).actions[position];
        let op = Op { number: action.number, kind: action.kind, step: Some(step), count, after: vec![] };
        self.placed[t].push(Placed { position, sequence: self.next, op });
        self.next += 1;
    }

    /// Notes that `t` reads its own memory.
    fn read(&mut self, t: usize, action: &Action, cell: Cell, count: usize) -> Result<()> {
        let rank = self.states[t].rank;
        for cell in cells(cell, count) {
            let place = self.plan.place(rank, cell);
            self.check(t, action, rank, cell, place, false)?;
            let now = (t, self.now(t));
            self.memory[rank][place].readers.push(now);
        }
        Ok(())
    }

    fn written(&mut self, t: usize, action: &Action, cell: Cell, count: usize, packet: bool) -> Result<()> {
        let rank = self.states[t].rank;
        for cell in cells(cell, count) {
            let place = self.plan.place(rank, cell);
            self.check(t, action, rank, cell, place, true)?;
            let writer = Some((t, self.now(t)));
            self.memory[rank][place] = Memory { writer, packet, ..Memory::default() };
        }
        Ok(())
    }

    /// Checks that all other accesses are known to be over.
    fn check(&self, t: usize, action: &Action, rank: usize, cell: Cell, place: usize, writes: bool) -> Result<()> {
        let memory = &self.memory[rank][place];
        let verb = if writes { "writes" } else { "reads" };
        let of = if rank == self.states[t].rank { String::new() } else { format!(" of rank {rank}") };
        if let Some(&put) = memory.pending.first() {
            let from = &self.states[self.puts[put].from];
            let id = self.blocks[from.rank][from.block].id;
            let detail = format!(
                "{verb} {cell}{of}, where rank {}, threadblock {id}, puts data: no wait before says that it is there",
                from.rank
            );
            return Err(self.wrong(t, action, &detail));
        }
        let readers = if writes { memory.readers.as_slice() } else { &[] };
        let writer = memory.writer.iter().find(|access| !self.knows(t, access));
        match writer.or_else(|| readers.iter().find(|access| !self.knows_read(t, access))) {
            Some(&(other, _)) => {
                let id = self.block(other).id;
                let rank = self.states[other].rank;
                let detail = format!("{verb} {cell}{of}, and nothing orders that with rank {rank}, threadblock {id}");
                Err(self.wrong(t, action, &detail))
            }
            None => Ok(()),
        }
    }

    /// Writes chunks of ours to another rank's memory.
    fn put(&mut self, t: usize, action: &Action, src: Cell, to: Operand, count: usize, packet: bool) -> Result<()> {
        let at = self.puts.len();
        for cell in cells(to.cell, count) {
            let place = self.plan.place(to.rank, cell);
            let memory = &self.memory[to.rank][place];
            let pending = memory.pending.iter().map(|&put| (self.puts[put].from, self.puts[put].time));
            let writer = pending.chain(memory.writer).find(|access| !self.knows(t, access));
            let reader = || memory.readers.iter().copied().find(|access| !self.knows_read(t, access));
            if let Some((other, _)) = writer.or_else(reader) {
                let (rank, id) = (self.states[other].rank, self.block(other).id);
                let detail = format!(
                    "writes {cell} of rank {}, and nothing orders that with rank {rank}, threadblock {id}",
                    to.rank
                );
                return Err(self.wrong(t, action, &detail));
            }
            self.memory[to.rank][place].pending.push(at);
        }
        let message = self.message();
        self.place(t, self.states[t].action, Step::Send { to: message, src }, count);
        let read = Rc::clone(&self.states[t].known.read);
        self.puts.push(Put { message, from: t, time: self.now(t), to, count, packet, read });
        self.unknown[to.rank].push(at);
        Ok(())
    }

    /// Has another rank send chunks of its memory; returns the message.
    fn get(&mut self, t: usize, action: &Action, from: Operand, count: usize) -> Result<usize> {
        let mut writers = Vec::new();
        for cell in cells(from.cell, count) {
            let place = self.plan.place(from.rank, cell);
            self.check(t, action, from.rank, cell, place, false)?;
            writers.extend(self.memory[from.rank][place].writer);
        }
        writers.sort_unstable();
        writers.dedup();
        let known = &self.states[t].known;
        let theirs = self.first[from.rank]..self.first[from.rank] + self.blocks[from.rank].len();
        // Its operations that we know of; those of before a write do not serve.
        let position = |s: usize| {
            if writers.is_empty() {
                return (known.begun[s] as usize).checked_sub(1);
            }
            let last = (known.over[s] as usize).checked_sub(1)?;
            let knew = |&(other, time): &(usize, u32)| {
                s == other && known.over[s] >= time
                    || self.states[s].history.get(last).is_some_and(|clock| clock[other] >= time)
            };
            writers.iter().all(knew).then_some(last)
        };
        let signalled = self.states[t].signalled.iter().rev().copied().filter(|s| theirs.contains(s));
        let found = signalled.chain(theirs.clone()).find_map(|s| Some((s, position(s)?)));
        let Some((s, position)) = found else {
            let detail =
                format!("reads {} of rank {} before a signal of that rank says that it is there", from.cell, from.rank);
            return Err(self.wrong(t, action, &detail));
        };
        let message = self.message();
        self.connect(message, s, t, false, self.puts.len());
        self.place(s, position, Step::Send { to: message, src: from.cell }, count);
        let now = (t, self.now(t));
        for cell in cells(from.cell, count) {
            let place = self.plan.place(from.rank, cell);
            self.memory[from.rank][place].readers.push(now);
        }
        Ok(message)
    }

    pub(super) fn combine(
        &mut self,
        t: usize,
        action: &Action,
        [operands, to]: [&[Operand]; 2],
        [packets, as_packets]: [&Range<usize>; 2],
        count: usize,
    ) -> Result<()> {
        let (rank, position) = (self.states[t].rank, self.states[t].action);
        let places = |all: &[Operand]| -> Vec<usize> {
            all.iter().filter(|one| one.rank == rank).map(|one| self.plan.place(rank, one.cell)).collect()
        };
        let targets = places(to);
        let both = places(operands).into_iter().chain(targets.iter().copied());
        if both.flat_map(|a| targets.iter().map(move |&b| a.abs_diff(b))).any(|apart| apart > 0 && apart < count) {
            return Err(self.wrong(t, action, "its buffers overlap"));
        }
        let mut sources = Vec::with_capacity(operands.len());
        for (at, &operand) in operands.iter().enumerate() {
            sources.push(if packets.contains(&at) {
                self.packet(t, operand);
                Source::Ours(operand.cell)
            } else if operand.rank == rank {
                self.read(t, action, operand.cell, count)?;
                Source::Ours(operand.cell)
            } else {
                Source::Theirs(self.get(t, action, operand, count)?)
            });
        }
        let same = |a: Cell, b: Cell| self.plan.place(rank, a) == self.plan.place(rank, b);
        let target = to.first().filter(|to| to.rank == rank).map(|to| to.cell);
        // The sum is made where it belongs, unless an operand is there that is needed later.
        let later = |cell: Cell| sources.iter().skip(2).any(|source| source.is(|other| same(other, cell)));
        let result = match (sources.as_slice(), target) {
            ([Source::Ours(one)], _) => *one,
            (_, Some(target)) if !later(target) => target,
            _ => {
                let chunk = self.plan.scratch[rank];
                self.plan.scratch[rank] += count;
                self.memory[rank].extend((0..count).map(|_| Memory::default()));
                Cell { buf: Buf::Scratch, chunk }
            }
        };
        let same = |a: Cell, b: Cell| self.plan.place(rank, a) == self.plan.place(rank, b);
        let last = false;
        let mut steps: Vec<Step<usize, Cell>> = Vec::new();
        let rest: &[Source] = match sources.as_slice() {
            [Source::Ours(_)] => &[],
            [Source::Theirs(message)] => {
                steps.push(Step::Recv { from: *message, dst: result });
                &[]
            }
            [Source::Ours(a), Source::Ours(b), rest @ ..] => {
                let (own, other) = if same(*b, result) { (b, a) } else { (a, b) };
                if !same(*own, result) {
                    steps.push(Step::Copy { src: *own, dst: result });
                }
                steps.push(Step::Reduce { src: *other, dst: result, last });
                rest
            }
            [Source::Ours(a), Source::Theirs(message), rest @ ..]
            | [Source::Theirs(message), Source::Ours(a), rest @ ..] => {
                steps.push(Step::RecvReduceCopy { from: *message, src: *a, dst: result, last });
                rest
            }
            [Source::Theirs(first), Source::Theirs(second), rest @ ..] => {
                steps.push(Step::Recv { from: *first, dst: result });
                steps.push(Step::RecvReduceCopy { from: *second, src: result, dst: result, last });
                rest
            }
            [] => return Err(self.wrong(t, action, "has no operand")),
        };
        for source in rest {
            steps.push(match *source {
                Source::Ours(src) => Step::Reduce { src, dst: result, last },
                Source::Theirs(from) => Step::RecvReduceCopy { from, src: result, dst: result, last },
            });
        }
        steps.into_iter().for_each(|step| self.place(t, position, step, count));
        for (at, &to) in to.iter().enumerate() {
            let packet = as_packets.contains(&at);
            if to.rank != rank {
                self.put(t, action, result, to, count, packet)?;
                continue;
            }
            self.written(t, action, to.cell, count, packet)?;
            if self.plan.place(rank, to.cell) != self.plan.place(rank, result) {
                self.place(t, position, Step::Copy { src: result, dst: to.cell }, count);
            }
        }
        Ok(())
    }

    /// Receives a packet, if it is not here yet; before it, what else its sender wrote for this threadblock alone.
    fn packet(&mut self, t: usize, operand: Operand) {
        let place = self.plan.place(operand.rank, operand.cell);
        let waiting = self.memory[operand.rank][place].pending.iter().copied().find(|&put| self.puts[put].packet);
        let Some(wanted) = waiting else { return };
        let alone = |&put: &usize| {
            let Put { from, to, packet, .. } = self.puts[put];
            let readers = self.packet_readers.get(&(to.rank, self.plan.place(to.rank, to.cell)));
            let ours = readers.is_some_and(|readers| readers.len() == 1 && readers.contains(&t));
            put < wanted && packet && from == self.puts[wanted].from && ours
        };
        let before: Vec<usize> = self.unknown[operand.rank].iter().copied().filter(alone).collect();
        before.into_iter().chain([wanted]).for_each(|put| self.deliver(t, put));
    }
}

/// So many chunks from this one on.
fn cells(first: Cell, count: usize) -> impl Iterator<Item = Cell> {
    (0..count).map(move |at| Cell { chunk: first.chunk + at, ..first })
}

/// An operand of ours, or the message that brings it.
#[derive(Debug, Clone, Copy)]
enum Source {
    Ours(Cell),
    Theirs(usize),
}

impl Source {
    fn is(&self, wanted: impl Fn(Cell) -> bool) -> bool {
        matches!(*self, Source::Ours(cell) if wanted(cell))
    }
}
