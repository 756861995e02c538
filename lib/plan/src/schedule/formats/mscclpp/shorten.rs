//! Joins steps of a threadblock that are one step of a schedule: a message that is received into scratch memory and
//! then copied or combined, a result that is sent on.

use std::collections::HashMap;

use super::super::threads::{Cell, Op, Threads};
use crate::schedule::{Buf, Step};

/// A step with the operation that it belongs to, and its place in the run.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) position: usize,
    pub(super) sequence: usize,
    pub(super) op: Op,
}

/// Accesses to each place of a rank's memory: (place in the run, threadblock).
struct Accesses<'a> {
    plan: &'a Threads,
    rank: usize,
    of: HashMap<usize, Vec<(usize, usize)>>,
}

impl<'a> Accesses<'a> {
    fn new(plan: &'a Threads, rank: usize, threads: &[Vec<Placed>]) -> Accesses<'a> {
        let mut of: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
        for (thread, ops) in threads.iter().enumerate() {
            for placed in ops {
                let cells = placed.op.step.map(|step| [step.read(), step.write()]).into_iter().flatten().flatten();
                for cell in cells.flat_map(|cell| chunks(cell, placed.op.count)) {
                    let all = of.entry(plan.place(rank, cell)).or_default();
                    if all.last() != Some(&(placed.sequence, thread)) {
                        all.push((placed.sequence, thread));
                    }
                }
            }
        }
        Accesses { plan, rank, of }
    }

    fn place(&self, cell: Cell) -> usize {
        self.plan.place(self.rank, cell)
    }

    fn same(&self, a: Cell, b: Cell) -> bool {
        self.place(a) == self.place(b)
    }

    /// Returns true if no other threadblock accesses the chunks between two steps.
    fn quiet(&self, cell: Cell, count: usize, thread: usize, a: usize, b: usize) -> bool {
        let between = a.min(b) + 1..a.max(b);
        chunks(cell, count).all(|cell| {
            let all = self.of.get(&self.place(cell));
            all.is_none_or(|all| !all.iter().any(|(at, other)| *other != thread && between.contains(at)))
        })
    }

    /// Returns true if so many steps access each of the chunks at all.
    fn are(&self, cell: Cell, count: usize, steps: usize) -> bool {
        chunks(cell, count).all(|cell| self.of.get(&self.place(cell)).is_some_and(|all| all.len() == steps))
    }
}

fn chunks(first: Cell, count: usize) -> impl Iterator<Item = Cell> {
    (0..count).map(move |at| Cell { chunk: first.chunk + at, ..first })
}

/// Joins what can be joined in the threadblocks of a rank.
pub(super) fn shorten(plan: &Threads, rank: usize, threads: &mut [Vec<Placed>]) {
    let accesses = Accesses::new(plan, rank, threads);
    for (thread, ops) in threads.iter_mut().enumerate() {
        receives(&accesses, thread, ops);
        copies(&accesses, thread, ops);
    }
    let accesses = Accesses::new(plan, rank, threads);
    for (thread, ops) in threads.iter_mut().enumerate() {
        sends(&accesses, thread, ops);
    }
}

/// A message into scratch memory goes where it is copied to, or is combined as it comes.
fn receives(accesses: &Accesses<'_>, thread: usize, ops: &mut Vec<Placed>) {
    let mut at = 0;
    while at < ops.len() {
        let Some(Step::Recv { from, dst: slot }) = ops[at].op.step else {
            at += 1;
            continue;
        };
        let (sequence, count) = (ops[at].sequence, ops[at].op.count);
        // Places of the same memory are alike, or far from each other, where the steps have as many chunks.
        let uses_it = |cell: Cell, of: usize| {
            let (a, b) = (accesses.place(cell), accesses.place(slot));
            a < b + count && b < a + of
        };
        let mut joined = None;
        for (user, placed) in ops.iter().enumerate().skip(at + 1) {
            let Some(step) = placed.op.step else { break };
            let uses = [step.read(), step.write()].into_iter().flatten().any(|cell| uses_it(cell, placed.op.count));
            if !uses && step.from().is_none() && step.to().is_none() {
                continue;
            }
            if uses && placed.op.count == count && accesses.quiet(slot, count, thread, sequence, placed.sequence) {
                let last = false;
                joined = match step {
                    Step::Copy { src, dst } if accesses.same(src, slot) && accesses.are(slot, count, 2) => {
                        Some((user, Step::Recv { from, dst }))
                    }
                    Step::Reduce { src, dst, .. } if accesses.same(src, slot) && accesses.are(slot, count, 2) => {
                        Some((user, Step::RecvReduceCopy { from, src: dst, dst, last }))
                    }
                    Step::Reduce { src, dst, .. } if accesses.same(dst, slot) => {
                        Some((user, Step::RecvReduceCopy { from, src, dst, last }))
                    }
                    _ => None,
                };
            }
            break;
        }
        match joined {
            Some((user, step)) => {
                ops[user].op.step = Some(step);
                ops.remove(at);
            }
            None => at += 1,
        }
    }
}

/// An operand that is copied to the place of the result is read where it was.
fn copies(accesses: &Accesses<'_>, thread: usize, ops: &mut Vec<Placed>) {
    let mut at = 0;
    while at + 1 < ops.len() {
        let between = (ops[at].sequence, ops[at + 1].sequence);
        let count = ops[at].op.count;
        let quiet = |cell| accesses.quiet(cell, count, thread, between.0, between.1);
        match (ops[at].op.step, ops[at + 1].op.step) {
            (Some(Step::Copy { src: own, dst: copy }), Some(Step::RecvReduceCopy { from, src, dst, last }))
                if ops[at + 1].op.count == count
                    && accesses.same(copy, src)
                    && accesses.same(src, dst)
                    && !accesses.same(own, dst)
                    && quiet(own)
                    && quiet(dst) =>
            {
                ops[at + 1].op.step = Some(Step::RecvReduceCopy { from, src: own, dst, last });
                ops.remove(at);
            }
            _ => at += 1,
        }
    }
}

/// A result is sent on by the step that makes it.
fn sends(accesses: &Accesses<'_>, thread: usize, ops: &mut Vec<Placed>) {
    let mut at = 0;
    while at + 1 < ops.len() {
        let between = (ops[at].sequence, ops[at + 1].sequence);
        let (count, counts) = (ops[at].op.count, ops[at].op.count == ops[at + 1].op.count);
        let sent = |dst: Cell, sent: Cell| {
            counts && accesses.same(dst, sent) && accesses.quiet(dst, count, thread, between.0, between.1)
        };
        let both = match (ops[at].op.step, ops[at + 1].op.step) {
            (Some(Step::Recv { from, dst }), Some(Step::Send { to, src })) if sent(dst, src) => {
                Some(Step::RecvCopySend { from, to, dst })
            }
            (Some(Step::RecvReduceCopy { from, src: own, dst, last }), Some(Step::Send { to, src }))
                if sent(dst, src) =>
            {
                // No other step looks at it.
                Some(if dst.buf == Buf::Scratch && !accesses.same(own, dst) && accesses.are(dst, count, 2) {
                    Step::RecvReduceSend { from, to, src: own }
                } else {
                    Step::RecvReduceCopySend { from, to, src: own, dst, last }
                })
            }
            _ => None,
        };
        if both.is_some() {
            ops[at].op.step = both;
            ops.remove(at + 1);
        }
        at += 1;
    }
}
