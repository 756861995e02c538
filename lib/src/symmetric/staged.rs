//! Staged: ordinary buffers pass in chunks through areas of the board that all ranks map.
//!
//! One step per chunk: a rank copies what others need of its input into its area (never what only it needs itself),
//! and takes what it needs from theirs. An all_reduce is two-shot: in a step each rank reduces its part of one
//! chunk, which stands in everybody's areas, and fetches the finished parts of the chunk before. So it takes one step more
//! than there are chunks, whatever the number of ranks, where a ring waits for its neighbour 2(n - 1) times per chunk. With more ranks
//! than cores every wait is a switch of the scheduler, and this is what counts.
//!
//! A rank writes up to [`STAGES`](super::layout::STAGES) chunks ahead of the slowest reader.

use super::board::Board;
use super::one_shot::writes;
use super::task::{Outcome, Plan, Task, Turn};
use super::work::{combine, copy, line, share};
use crate::algorithm::Shape;
use crate::reduce::stream;
use crate::wire::Collective;

/// Outputs of so many bytes or more are written around the cache.
const STREAM: usize = 8 << 20;

/// How far a rank is.
#[derive(Debug)]
pub(super) struct Staged {
    /// Number at the board of the first step.
    first: u64,
    /// Elements of a segment per step; the last chunk may be shorter.
    chunk: usize,
    /// Elements between two ranks' parts of a chunk, where ranks reduce parts for each other.
    part: usize,
    chunks: usize,
    steps: usize,
    published: usize,
    taken: usize,
    streams: bool,
}

/// Whether each rank reduces a part for the others.
fn is_two_shot(shape: &Shape) -> bool {
    matches!(shape.collective, Collective::AllReduce | Collective::Reduce)
}

/// Elements of a segment that one step can carry through an area of `area` bytes; 0 when it is too small for anything.
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

/// Whether `rank` takes something from `source`'s area.
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

/// Place of `reader`'s share among those that `writer` has for the others.
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

    /// Whether everything that this step reads is there.
    fn others_are_here(&self, board: &Board, task: &Task<'_>) -> Result<(), Turn> {
        let (shape, rank) = (&task.plan.shape, board.rank());
        if self.taken == self.chunks && !has_output(shape, rank) {
            return Ok(());
        }
        for source in (0..shape.ranks).filter(|&s| reads(shape, rank, s)) {
            task.message(board, source)?;
        }
        Ok(())
    }

    /// Writes what others need in the step after those published.
    ///
    /// # Safety
    /// As [`super::run`].
    unsafe fn publish(&mut self, board: &mut Board, task: &Task<'_>) -> Result<(), Turn> {
        let step = self.published;
        let shape = &task.plan.shape;
        if writes(shape, board.rank()) {
            self.credit(board, step)?;
            // SAFETY: forwarded from the caller; nobody reads the area any more.
            unsafe { self.write(board, task, step) };
            board.publish(self.number(step), &task.header, [0; 3], self.written(task.plan, step));
        }
        self.published += 1;
        Ok(())
    }

    /// The area of `step` may be written.
    fn credit(&self, board: &mut Board, step: usize) -> Result<(), Turn> {
        board.no_stage(self.number(step)).map_or(Ok(()), Err)
    }

    /// Bytes of our area as far as `step` may have written to them; what is not written is as it was.
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

    /// Our chunk for `step`, but for what only we need.
    ///
    /// # Safety
    /// As [`super::run`]; the area must be ours to write.
    unsafe fn write(&self, board: &Board, task: &Task<'_>, step: usize) {
        let plan = task.plan;
        let (shape, rank, elem) = (&plan.shape, board.rank(), plan.elem);
        if step >= self.chunks {
            return;
        }
        let area = board.stage(rank, self.number(step));
        let range = self.range(plan, step);
        let others = (0..shape.ranks).filter(|&r| r != rank);
        // SAFETY: ranges lie within the segments, and what is written fits into the area (`largest_chunk`).
        unsafe {
            match shape.collective {
                Collective::AllReduce | Collective::Reduce => {
                    // After the part that we have reduced.
                    for reader in others {
                        let piece = share(range.len(), elem, reader, shape.ranks);
                        let from = task.buffers.input.wrapping_add((range.start + piece.start) * elem);
                        let to = area.wrapping_add((1 + place(rank, reader)) * self.part * elem);
                        copy(from, to, piece.len() * elem, false);
                    }
                }
                Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => {
                    for reader in others {
                        let from = task.buffers.input.wrapping_add((reader * plan.count + range.start) * elem);
                        let to = area.wrapping_add(place(rank, reader) * self.chunk * elem);
                        copy(from, to, range.len() * elem, false);
                    }
                }
                _ => copy(task.buffers.input.wrapping_add(range.start * elem), area, range.len() * elem, false),
            }
        }
    }

    /// One step of a collective whose results come straight from the areas.
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
        // Each begins with its own, so that no rank's area is everybody's first.
        let sources = (1..shape.ranks).map(|i| (rank + i) % shape.ranks);
        // SAFETY: by the caller; ranges lie within segments and areas.
        unsafe {
            match shape.collective {
                Collective::ReduceScatter => {
                    let from = |s: usize| if s == rank { input(rank) } else { apart(s) };
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

    /// One step of a two-shot collective: reduces our part, publishes it with the next chunk, and only then takes the finished
    /// parts of the chunk before, so that the others need not wait for that.
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
                true => input.wrapping_add(skip),
                false => {
                    board.stage(source, number).wrapping_add((1 + place(source, rank)) * self.part * elem).cast_const()
                }
            };
            let sources: Vec<_> = (0..shape.ranks).map(from).collect();
            let next = board.stage(rank, self.number(step + 1));
            // SAFETY: by the caller; parts lie within the areas, and there is credit for the next one.
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
