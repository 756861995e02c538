//! Staged: ordinary buffers pass in chunks through the ranks' stages in the shared region.
//!
//! One step per chunk: a rank copies those parts of its input that others need into its stage, and reads the parts that
//! it needs from theirs. An all_reduce is two-shot: in a step each rank reduces its part of one chunk from all stages,
//! and copies out the finished parts of the chunk before. So it takes one step more than there are chunks, for any
//! number of ranks; a ring waits for its neighbour 2(n - 1) times per chunk. With more ranks than cores every wait is a
//! context switch, so the number of waits matters most.
//!
//! A rank writes up to [`STAGES`](super::layout::STAGES) chunks ahead of the slowest reader.

use super::board::Board;
use super::one_shot::writes;
use super::task::{Plan, Task};
use super::turn::{Differs, Outcome, Turn};
use super::work::{combine, copy, line, publish_input, share};
use crate::reduce::{Operand, stream};
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::wire::Collective;

/// Bytes of an output from which on it is written by non-temporal stores.
const STREAM: usize = 8 << 20;

/// Progress of a rank in a staged call.
#[derive(Debug)]
pub(super) struct Staged {
    /// Number of the first step in the shared region.
    first: u64,
    /// Elements of a segment per step; the last chunk may be shorter.
    chunk: usize,
    /// Elements between two ranks' parts of a chunk, if ranks reduce parts for each other.
    part: usize,
    chunks: usize,
    steps: usize,
    published: usize,
    taken: usize,
    streams: bool,
}

/// True if each rank reduces a part for the others.
fn is_two_shot(shape: &Shape) -> bool {
    matches!(shape.collective, Collective::AllReduce | Collective::Reduce)
}

/// Elements of a segment that one step can carry through a stage of `area` bytes; 0 when that is too small.
pub(crate) fn largest_chunk(shape: &Shape, elem: usize, area: usize) -> usize {
    let (ranks, line) = (shape.ranks, line(elem));
    match shape.collective {
        // Every rank's part begins at a cache line.
        Collective::AllReduce | Collective::Reduce => area / elem / ranks / line * line * ranks,
        Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => {
            area / elem / (ranks - 1).max(1) / line * line
        }
        _ => area / elem / line * line,
    }
}

/// True if `rank` reads from `source`'s stage.
fn reads(shape: &Shape, rank: usize, source: usize) -> bool {
    let needs = match shape.collective {
        Collective::Broadcast | Collective::Scatter => source == shape.root,
        Collective::Gather => rank == shape.root,
        _ => true,
    };
    needs && rank != source
}

fn has_output(shape: &Shape, rank: usize) -> bool {
    shape.output_segments(rank) > 0
}

/// Index of `reader`'s part among those that `writer` has for the others.
fn place(writer: usize, reader: usize) -> usize {
    reader - usize::from(reader > writer)
}

impl Staged {
    pub(super) fn new(board: &mut Board, plan: &Plan) -> Staged {
        let shape = &plan.shape;
        let largest = largest_chunk(shape, plan.elem, board.stage_bytes()).max(1);
        let unit = line(plan.elem) * if is_two_shot(shape) { shape.ranks } else { 1 };
        // All of about the same size, rather than a short one at the end.
        let chunk = plan.count.div_ceil(plan.count.div_ceil(largest).max(1)).next_multiple_of(unit).max(1);
        let chunks = plan.count.div_ceil(chunk).max(1);
        let steps = chunks + usize::from(is_two_shot(shape));
        let segments = shape.output_segments(board.rank());
        let streams = plan.bytes().saturating_mul(segments) >= STREAM;
        let part = chunk / shape.ranks;
        Staged { first: board.start(steps), chunk, part, chunks, steps, published: 0, taken: 0, streams }
    }

    fn number(&self, step: usize) -> u64 {
        self.first + step as u64
    }

    /// Elements of a segment that are `chunk`'s.
    fn range(&self, plan: &Plan, chunk: usize) -> std::ops::Range<usize> {
        (chunk * self.chunk).min(plan.count)..((chunk + 1) * self.chunk).min(plan.count)
    }

    /// # Safety
    /// As [`super::run`].
    pub(super) unsafe fn advance(&mut self, board: &mut Board, task: &mut Task<'_>) -> Turn {
        loop {
            if self.taken == self.steps {
                stream::fence();
                return Turn::Ended(Outcome::Done);
            }
            task.number = self.number(self.taken);
            // SAFETY: forwarded from the caller.
            unsafe {
                if self.published == self.taken {
                    if let Err(turn) = self.publish(board, task) {
                        return turn;
                    }
                    continue;
                }
                if let Err(turn) = self.others_are_here(board, task) {
                    // Meanwhile, the next chunk. That of a two-shot step waits for the reduced parts.
                    if is_two_shot(&task.plan.shape)
                        || self.published == self.steps
                        || self.publish(board, task).is_err()
                    {
                        return turn;
                    }
                    continue;
                }
                if is_two_shot(&task.plan.shape) {
                    if let Err(turn) = self.reduce(board, task) {
                        return turn;
                    }
                } else {
                    self.take(board, task);
                }
            }
            board.finish(self.number(self.taken));
            self.taken += 1;
        }
    }

    /// Fails with the rank that is missing unless everything that this step reads has arrived.
    fn others_are_here(&self, board: &Board, task: &Task<'_>) -> Result<(), Turn> {
        let (shape, rank) = (&task.plan.shape, board.rank());
        if self.taken == self.chunks && !has_output(shape, rank) {
            return Ok(());
        }
        for source in (0..shape.ranks).filter(|&s| reads(shape, rank, s)) {
            task.message(board, source).map_err(|turn| self.placed(task.plan, turn))?;
        }
        Ok(())
    }

    /// Gives a difference in a stage its place in the input.
    fn placed(&self, plan: &Plan, turn: Turn) -> Turn {
        match turn {
            Turn::Corrupt(source, differs) => {
                let offset = differs.offset + self.range(plan, self.taken).start * plan.elem;
                Turn::Corrupt(source, Differs { offset, ..differs })
            }
            turn => turn,
        }
    }

    /// Writes the data that others need in the first unpublished step.
    ///
    /// # Safety
    /// As [`super::run`].
    unsafe fn publish(&mut self, board: &mut Board, task: &Task<'_>) -> Result<(), Turn> {
        let step = self.published;
        let shape = &task.plan.shape;
        if writes(shape, board.rank()) {
            self.credit(board, step)?;
            // SAFETY: forwarded from the caller; no rank reads the stage any more.
            unsafe { self.write(board, task, step) };
            board.publish(self.number(step), &task.header, [0; 3], self.written(task.plan, step));
        }
        self.published += 1;
        Ok(())
    }

    /// The stage of `step` may be written.
    fn credit(&self, board: &mut Board, step: usize) -> Result<(), Turn> {
        board.no_stage(self.number(step)).map_or(Ok(()), Err)
    }

    /// Bytes of our stage up to the last that `step` may have written; others keep their old values.
    fn written(&self, plan: &Plan, step: usize) -> usize {
        let elements = match plan.shape.collective {
            _ if is_two_shot(&plan.shape) => plan.shape.ranks * self.part,
            Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => {
                (plan.shape.ranks - 1) * self.chunk
            }
            _ => self.range(plan, step).len(),
        };
        elements * plan.elem
    }

    /// Our chunk for `step`, without the part that only we need.
    ///
    /// # Safety
    /// As [`super::run`]; the stage must be ours to write.
    unsafe fn write(&self, board: &Board, task: &Task<'_>, step: usize) {
        let plan = task.plan;
        let (shape, rank, elem) = (&plan.shape, board.rank(), plan.elem);
        if step >= self.chunks {
            return;
        }
        let area = board.stage(rank, self.number(step));
        let range = self.range(plan, step);
        let others = (0..shape.ranks).filter(|&r| r != rank);
        // SAFETY: ranges lie within the segments, and the written bytes fit into the stage (`largest_chunk`).
        unsafe {
            match shape.collective {
                Collective::AllReduce | Collective::Reduce => {
                    // After the part that we have reduced.
                    for reader in others {
                        let piece = share(range.len(), elem, reader, shape.ranks);
                        let from = task.buffers.input.wrapping_add((range.start + piece.start) * elem);
                        let to = area.wrapping_add((1 + place(rank, reader)) * self.part * elem);
                        publish_input(plan, from, to, piece.len());
                    }
                }
                Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => {
                    for reader in others {
                        let from = task.buffers.input.wrapping_add((reader * plan.count + range.start) * elem);
                        let to = area.wrapping_add(place(rank, reader) * self.chunk * elem);
                        publish_input(plan, from, to, range.len());
                    }
                }
                _ => publish_input(plan, task.buffers.input.wrapping_add(range.start * elem), area, range.len()),
            }
        }
    }

    /// One step of a collective whose results come straight from the stages.
    ///
    /// # Safety
    /// As [`super::run`]; everything that the step reads must have come.
    unsafe fn take(&self, board: &Board, task: &Task<'_>) {
        let plan = task.plan;
        let (shape, rank, elem) = (&plan.shape, board.rank(), plan.elem);
        let (step, number) = (self.taken, self.number(self.taken));
        let range = self.range(plan, step);
        let bytes = range.len() * elem;
        let input = |segment: usize| task.buffers.input.wrapping_add((segment * plan.count + range.start) * elem);
        let output = |segment: usize| task.buffers.output.wrapping_add((segment * plan.count + range.start) * elem);
        let apart = |source: usize| {
            let place = place(source, rank) * self.chunk * elem;
            board.stage(source, number).wrapping_add(place).cast_const()
        };
        let whole = |source: usize| board.stage(source, number).cast_const();
        // Each rank begins with its own stage, so that ranks do not all begin with the same one.
        let sources = (1..shape.ranks).map(|i| (rank + i) % shape.ranks);
        // SAFETY: by the caller; ranges lie within segments and stages.
        unsafe {
            match shape.collective {
                Collective::ReduceScatter => {
                    let from =
                        |s: usize| if s == rank { Operand::input(input(rank)) } else { Operand::product(apart(s)) };
                    let sources: Vec<_> = (0..shape.ranks).map(from).collect();
                    combine(plan, &sources, &[output(0)], 0..range.len(), false);
                }
                Collective::AllToAll => {
                    copy(input(rank), output(rank), bytes, self.streams);
                    sources.for_each(|s| copy(apart(s), output(s), bytes, self.streams));
                }
                Collective::AllGather | Collective::Gather if has_output(shape, rank) => {
                    copy(input(0), output(rank), bytes, self.streams);
                    sources.for_each(|s| copy(whole(s), output(s), bytes, self.streams));
                }
                Collective::Broadcast if rank == shape.root => copy(input(0), output(0), bytes, self.streams),
                Collective::Broadcast => copy(whole(shape.root), output(0), bytes, self.streams),
                Collective::Scatter if rank == shape.root => copy(input(rank), output(0), bytes, self.streams),
                Collective::Scatter => copy(apart(shape.root), output(0), bytes, self.streams),
                _ => {}
            }
        }
    }

    /// One step of a two-shot collective: reduces our part, publishes it with the next chunk, and only then copies out
    /// the finished parts of the chunk before, so that the others do not wait for this copy.
    ///
    /// # Safety
    /// As [`super::run`]; everything that the step reads must have come.
    unsafe fn reduce(&mut self, board: &mut Board, task: &Task<'_>) -> Result<(), Turn> {
        let plan = task.plan;
        let (shape, rank, elem) = (&plan.shape, board.rank(), plan.elem);
        let (step, number) = (self.taken, self.number(self.taken));
        let (input, output) = (task.buffers.input, task.buffers.output);
        if step < self.chunks {
            self.credit(board, step + 1)?;
            let range = self.range(plan, step);
            let ours = share(range.len(), elem, rank, shape.ranks);
            let skip = (range.start + ours.start) * elem;
            let from = |source: usize| match source == rank {
                true => Operand::input(input.wrapping_add(skip)),
                false => {
                    let part = (1 + place(source, rank)) * self.part * elem;
                    Operand::product(board.stage(source, number).wrapping_add(part).cast_const())
                }
            };
            let sources: Vec<_> = (0..shape.ranks).map(from).collect();
            let next = board.stage(rank, self.number(step + 1));
            // SAFETY: by the caller; parts lie within the stages, and there is credit for the next one.
            unsafe {
                let result = output.wrapping_add(skip);
                match shape.collective {
                    Collective::AllReduce => combine(plan, &sources, &[result, next], 0..ours.len(), false),
                    _ if rank == shape.root => combine(plan, &sources, &[result], 0..ours.len(), false),
                    _ => combine(plan, &sources, &[next], 0..ours.len(), false),
                }
                self.write(board, task, step + 1);
            }
            board.publish(self.number(step + 1), &task.header, [0; 3], self.written(plan, step + 1));
            self.published = step + 2;
        }
        if let Some(before) = step.checked_sub(1)
            && has_output(shape, rank)
        {
            let range = self.range(plan, before);
            for source in (1..shape.ranks).map(|i| (rank + i) % shape.ranks) {
                let piece = share(range.len(), elem, source, shape.ranks);
                let to = output.wrapping_add((range.start + piece.start) * elem);
                // SAFETY: by the caller.
                unsafe { copy(board.stage(source, number), to, piece.len() * elem, self.streams) };
            }
        }
        Ok(())
    }
}
