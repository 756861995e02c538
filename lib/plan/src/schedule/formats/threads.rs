//! A collective as threadblocks over chunks: what files of MSCCL and of mscclpp have in common once they are read.
//!
//! Threadblocks of a rank run beside each other. Links and explicit dependencies order them, so they are not yet lanes:
//! see [`lanes`](super::lanes).

use std::collections::{HashMap, HashSet};

use crate::error::{Error, Result};
use crate::schedule::{Buf, Shape, Step};
use crate::wire::Collective;

/// More chunks of all ranks together than any file needs; each takes some hundred bytes while it is proved.
const MOST_CHUNKS: usize = 1 << 21;
/// Most steps times threadblocks of all ranks: what each step knows of each threadblock.
const MOST_CLOCKS: usize = 1 << 27;

/// A chunk of a buffer, or the first of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Cell {
    pub(super) buf: Buf,
    pub(super) chunk: usize,
}

impl Cell {
    /// In words, with those behind it.
    pub(super) fn with(self, count: usize) -> String {
        match count {
            0 | 1 => self.to_string(),
            _ => format!("{self}, and {} behind it", count - 1),
        }
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let buf = match self.buf {
            Buf::Input => "input",
            Buf::Output => "output",
            Buf::Scratch => "scratch",
        };
        write!(f, "chunk {} of the {buf} buffer", self.chunk)
    }
}

/// One direction between two threadblocks, each named by rank and place in [`Threads::ranks`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Conn {
    pub(super) from: (usize, usize),
    pub(super) to: (usize, usize),
}

/// A step of a threadblock.
#[derive(Debug, Clone)]
pub(super) struct Op {
    /// Its number in the file.
    pub(super) number: usize,
    /// The file's name of what it does.
    pub(super) kind: &'static str,
    /// The primitive, with the place of its link in [`Threads::conns`]; `None` only waits. `last` means nothing here.
    pub(super) step: Option<Step<usize, Cell>>,
    /// Chunks that it works on, one after the other in memory.
    pub(super) count: usize,
    /// Steps of other threadblocks of the rank that have to be done before: (threadblock, step), both as places.
    pub(super) after: Vec<(usize, usize)>,
}

/// A threadblock: steps in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Thread {
    /// Its name in the file.
    pub(super) id: usize,
    pub(super) ops: Vec<Op>,
}

/// The threadblocks of all ranks.
#[derive(Debug, Clone)]
pub(super) struct Threads {
    /// The format, for errors.
    pub(super) format: &'static str,
    pub(super) shape: Shape,
    /// Chunks of a segment.
    pub(super) parts: usize,
    /// Input and output are the same memory.
    pub(super) in_place: bool,
    /// Chunks of scratch memory, by rank.
    pub(super) scratch: Vec<usize>,
    pub(super) ranks: Vec<Vec<Thread>>,
    pub(super) conns: Vec<Conn>,
}

impl Threads {
    /// Chunks of a buffer. A rank that has only one of input and output has it under both names in place.
    pub(super) fn chunks(&self, rank: usize, buf: Buf) -> usize {
        let (inputs, outputs) = (self.shape.input_segments(rank), self.shape.output_segments(rank));
        match buf {
            Buf::Input if inputs == 0 && self.in_place => outputs * self.parts,
            Buf::Output if outputs == 0 && self.in_place => inputs * self.parts,
            Buf::Input => inputs * self.parts,
            Buf::Output => outputs * self.parts,
            Buf::Scratch => self.scratch[rank],
        }
    }

    /// Place of a chunk in the memory of its rank: the input, the output behind it, scratch memory. In place the output
    /// has places of the input.
    pub(super) fn place(&self, rank: usize, cell: Cell) -> usize {
        let (inputs, outputs) = (self.shape.input_segments(rank), self.shape.output_segments(rank));
        match cell.buf {
            Buf::Input => cell.chunk,
            // The only buffer of the rank.
            Buf::Output if outputs == 0 => cell.chunk,
            Buf::Output if self.in_place && self.shape.collective == Collective::AllToAll => cell.chunk,
            Buf::Output => match self.shape.in_place(rank).filter(|_| self.in_place) {
                Some((input, output)) if output == cell.chunk / self.parts => {
                    input * self.parts + cell.chunk % self.parts
                }
                _ => inputs * self.parts + cell.chunk,
            },
            Buf::Scratch => (inputs + outputs) * self.parts + cell.chunk,
        }
    }

    /// The file's name of a step.
    pub(super) fn name(&self, rank: usize, thread: usize, op: usize) -> String {
        match self.ranks.get(rank).and_then(|threads| threads.get(thread)).map(|t| (t.id, t.ops.get(op))) {
            Some((id, Some(op))) => format!("rank {rank}, threadblock {id}, step {} ({})", op.number, op.kind),
            _ => format!("rank {rank}"),
        }
    }

    pub(super) fn wrong(&self, rank: usize, thread: usize, op: usize, detail: &str) -> Error {
        Error::invalid(self.format, format!("{}: {detail}", self.name(rank, thread, op)))
    }

    /// Refuses what would fill the memory.
    pub(super) fn fits(&self, steps: usize, threads: usize) -> Result<()> {
        match steps.max(threads).checked_mul(threads) {
            Some(clocks) if clocks <= MOST_CLOCKS => Ok(()),
            _ => Err(Error::invalid(
                self.format,
                format!("{steps} steps in {threads} threadblocks, expected at most {MOST_CLOCKS} by both together"),
            )),
        }
    }

    /// Checks each step by itself.
    pub(super) fn check(&self) -> Result<()> {
        let blocks = || self.ranks.iter().flatten();
        self.fits(blocks().map(|block| block.ops.len()).sum(), blocks().count())?;
        let buffers = [Buf::Input, Buf::Output, Buf::Scratch];
        let all = (0..self.shape.ranks)
            .flat_map(|rank| buffers.map(|buf| self.chunks(rank, buf)))
            .try_fold(0usize, usize::checked_add);
        if all.is_none_or(|all| all > MOST_CHUNKS) {
            return Err(Error::invalid(self.format, format!("expected at most {MOST_CHUNKS} chunks of all ranks")));
        }
        for (rank, threads) in self.ranks.iter().enumerate() {
            for (t, thread) in threads.iter().enumerate() {
                for (o, op) in thread.ops.iter().enumerate() {
                    let Some(step) = &op.step else { continue };
                    if op.count == 0 {
                        return Err(self.wrong(rank, t, o, "works on 0 chunks"));
                    }
                    for cell in [step.read(), step.write()].into_iter().flatten() {
                        let chunks = self.chunks(rank, cell.buf);
                        if cell.chunk.checked_add(op.count).is_none_or(|end| end > chunks) {
                            let detail = format!("{}: the buffer has {chunks}", cell.with(op.count));
                            return Err(self.wrong(rank, t, o, &detail));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The same with one chunk in each of these steps, (rank, threadblock, step), and in those at the other ends of
    /// their messages.
    pub(super) fn split(&self, steps: &[(usize, usize, usize)]) -> Threads {
        let single = self.with_partners(steps);
        let pieces = |at: (usize, usize, usize), op: &Op| if single.contains(&at) { op.count } else { 1 };
        let ranks = self.ranks.iter().enumerate().map(|(rank, threads)| {
            // The last step that stands for each one of before, by threadblock.
            let ends = |(t, thread): (usize, &Thread)| {
                let mut end = 0;
                let ends = thread.ops.iter().enumerate().map(|(o, op)| {
                    end += pieces((rank, t, o), op);
                    end - 1
                });
                ends.collect()
            };
            let last: Vec<Vec<usize>> = threads.iter().enumerate().map(ends).collect();
            let split = |(t, thread): (usize, &Thread)| {
                let mut ops = Vec::new();
                for (o, op) in thread.ops.iter().enumerate() {
                    let count = pieces((rank, t, o), op);
                    let after: Vec<_> = op.after.iter().map(|&(block, step)| (block, last[block][step])).collect();
                    ops.extend((0..count).map(|at| Op {
                        step: op.step.map(|step| if count > 1 { shifted(step, at) } else { step }),
                        count: if count > 1 { 1 } else { op.count },
                        after: if at == 0 { after.clone() } else { vec![] },
                        ..*op
                    }));
                }
                Thread { id: thread.id, ops }
            };
            threads.iter().enumerate().map(split).collect()
        });
        Threads { ranks: ranks.collect(), scratch: self.scratch.clone(), conns: self.conns.clone(), ..*self }
    }

    /// These steps, and all that send to them or receive from them, and so on.
    fn with_partners(&self, steps: &[(usize, usize, usize)]) -> HashSet<(usize, usize, usize)> {
        // By link, the steps at both ends in the order of its messages.
        let mut ends = vec![[Vec::new(), Vec::new()]; self.conns.len()];
        let mut places = HashMap::new();
        for (rank, threads) in self.ranks.iter().enumerate() {
            for (t, thread) in threads.iter().enumerate() {
                for (o, step) in thread.ops.iter().enumerate().filter_map(|(o, op)| Some((o, op.step.as_ref()?))) {
                    for (end, conn) in [step.to(), step.from()].into_iter().enumerate() {
                        let Some(conn) = conn else { continue };
                        places.entry((rank, t, o)).or_insert_with(Vec::new).push((
                            conn,
                            1 - end,
                            ends[conn][end].len(),
                        ));
                        ends[conn][end].push((rank, t, o));
                    }
                }
            }
        }
        let mut found: HashSet<_> = steps.iter().copied().collect();
        let mut new: Vec<_> = steps.to_vec();
        while let Some(step) = new.pop() {
            for &(conn, end, at) in places.get(&step).into_iter().flatten() {
                let partner = ends[conn][end].get(at).copied();
                new.extend(partner.filter(|partner| found.insert(*partner)));
            }
        }
        found
    }
}

/// The step, so many chunks further.
fn shifted(step: Step<usize, Cell>, by: usize) -> Step<usize, Cell> {
    let moved = step.map(Ok::<_, std::convert::Infallible>, |cell| Cell { chunk: cell.chunk + by, ..cell });
    match moved {
        Ok(moved) => moved,
        Err(never) => match never {},
    }
}
