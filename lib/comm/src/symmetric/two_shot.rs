//! Two-shot: ranks read and write each other's buffers directly.
//!
//! 1. *Arrive*: each rank publishes the locations of its buffers in symmetric memory, and reads those of the others. No
//!    rank's input is read before its owner has arrived. If some buffer lies elsewhere, all ranks see it, and all take
//!    another algorithm.
//! 2. *Compute*, without further messages. all_reduce is two-shot: a rank reduces its part of all inputs into all
//!    outputs.
//! 3. *Depart*: no rank returns, and may touch its buffers, before all have finished with them.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use super::allocation::{Allocation, Found, Registry};
use super::board::Board;
use super::task::Task;
use super::turn::{Differs, Outcome, Turn, Wait};
use super::work::{combine, copy, share};
use crate::reduce::{Operand, stream};
use crate::verify::sum;
use tinynccl_plan::wire::Collective;

/// Bytes per rank from which on outputs are written by non-temporal stores.
const STREAM: usize = 4 << 20;

#[derive(Debug)]
enum Stage {
    Describe,
    Meet { next: usize },
    Leave { next: usize },
}

/// Progress of a rank in a two-shot call.
#[derive(Debug)]
pub(super) struct TwoShot {
    stage: Stage,
    ours: Place,
    input: Option<Arc<Allocation>>,
    output: Option<Arc<Allocation>>,
    places: Vec<Place>,
}

/// Location of a rank's buffers; id 0: not in symmetric memory, or no such buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Place {
    input_id: u32,
    output_id: u32,
    input: u64,
    output: u64,
}

/// The part of each rank's input, in bytes, that `reader` reads for all ranks in a reduction.
fn part(task: &Task<'_>, reader: usize) -> Range<usize> {
    let (plan, ranks) = (task.plan, task.plan.shape.ranks);
    match plan.shape.collective {
        Collective::ReduceScatter => reader * plan.bytes()..(reader + 1) * plan.bytes(),
        _ => {
            let share = share(plan.count, plan.elem, reader, ranks);
            share.start * plan.elem..share.end * plan.elem
        }
    }
}

/// Sums of our input that are published: one per rank in a reduction that is verified. Equally many on all ranks.
fn sums_of_input(board: &Board, task: &Task<'_>) -> usize {
    let ranks = task.plan.shape.ranks;
    let wanted = task.plan.shape.collective.reduces() && board.verifies(&task.header);
    if wanted && 8 * ranks <= board.slot_bytes() { ranks } else { 0 }
}

/// # Safety
/// The input must hold all its segments, and our slot must be ours to write.
unsafe fn write_sums(board: &Board, task: &Task<'_>, sums: usize) {
    let to = board.payload(board.rank(), task.number).cast::<u64>();
    for reader in 0..sums {
        let part = part(task, reader);
        // SAFETY: by the caller; the slot holds that many sums.
        unsafe { *to.add(reader) = sum(slice::from_raw_parts(task.buffers.input.add(part.start), part.len())) };
    }
}

impl Place {
    fn to_words(self) -> [u64; 3] {
        [u64::from(self.input_id) << 32 | u64::from(self.output_id), self.input, self.output]
    }

    fn from_words(words: [u64; 3]) -> Place {
        Place { input_id: (words[0] >> 32) as u32, output_id: words[0] as u32, input: words[1], output: words[2] }
    }
}

impl TwoShot {
    pub(super) fn new(registry: &Registry, task: &Task<'_>, rank: usize) -> TwoShot {
        let (shape, bytes) = (&task.plan.shape, task.plan.bytes());
        // A buffer that this rank does not use (usually an empty slice) at least names the rank's allocation.
        let find = |segments: usize, address: *const u8| registry.find(address, segments * bytes);
        let input = find(shape.input_segments(rank), task.buffers.input);
        let output = find(shape.output_segments(rank), task.buffers.output);
        let id = |found: &Option<Found>| found.as_ref().map_or(0, |f| f.id);
        let offset = |found: &Option<Found>| found.as_ref().map_or(0, |f| f.offset as u64);
        let ours =
            Place { input_id: id(&input), output_id: id(&output), input: offset(&input), output: offset(&output) };
        TwoShot {
            stage: Stage::Describe,
            ours,
            input: input.map(|f| f.allocation),
            output: output.map(|f| f.allocation),
            places: vec![Place::default(); task.plan.shape.ranks],
        }
    }

    /// # Safety
    /// As [`super::run`].
    pub(super) unsafe fn advance(&mut self, board: &mut Board, task: &Task<'_>) -> Turn {
        let (rank, ranks) = (board.rank(), board.ranks());
        loop {
            match &mut self.stage {
                Stage::Describe => {
                    let sums = sums_of_input(board, task);
                    let missing = if sums > 0 { board.no_area(task.number) } else { board.no_line(task.number) };
                    if let Some(turn) = missing {
                        return turn;
                    }
                    // SAFETY: by the caller the input holds all its segments; there is room for the sums in our slot.
                    unsafe { write_sums(board, task, sums) };
                    board.publish(task.number, &task.header, self.ours.to_words(), 8 * sums);
                    self.places[rank] = self.ours;
                    self.stage = Stage::Meet { next: 0 };
                }
                Stage::Meet { next } if *next < ranks => {
                    if *next != rank {
                        match task.message(board, *next) {
                            Ok(message) => self.places[*next] = Place::from_words(message.inline),
                            Err(turn) => return turn,
                        }
                    }
                    *next += 1;
                }
                Stage::Meet { .. } => {
                    board.everyone_arrived(task.number);
                    // SAFETY: forwarded from the caller; every rank has arrived, so its buffers are ours to use as the
                    // collective says, until we have finished.
                    let worked = match unsafe { self.work(board, task) } {
                        Ok(worked) => worked,
                        Err(turn) => return turn,
                    };
                    stream::fence();
                    board.finish(task.number);
                    if !worked {
                        return Turn::Ended(Outcome::NotSymmetric);
                    }
                    self.stage = Stage::Leave { next: 0 };
                }
                Stage::Leave { next } if *next < ranks => {
                    if *next != rank && !board.has_finished(*next, task.number) {
                        return Turn::Blocked(*next, Wait::Finished(task.number));
                    }
                    *next += 1;
                }
                Stage::Leave { .. } => return Turn::Ended(Outcome::Done),
            }
        }
    }

    /// In a reduction that is verified: those `parts` of all inputs, which no other rank writes meanwhile, are what
    /// their owners have.
    ///
    /// # Safety
    /// As [`TwoShot::advance`]: all ranks have arrived.
    unsafe fn compare(
        &self,
        board: &Board,
        task: &Task<'_>,
        inputs: &[Operand],
        parts: Range<usize>,
    ) -> Result<(), Turn> {
        if sums_of_input(board, task) == 0 {
            return Ok(());
        }
        for (source, input) in inputs.iter().enumerate() {
            for reader in parts.clone() {
                let part = part(task, reader);
                // Operands begin with the segment that is ours.
                let skip = if task.plan.shape.collective == Collective::ReduceScatter { 0 } else { part.start };
                // SAFETY: by the caller; the sums stay until we finish this call.
                let [expected, got] = unsafe {
                    let bytes = slice::from_raw_parts(input.at.add(skip), part.len());
                    [*board.payload(source, task.number).cast::<u64>().add(reader), sum(bytes)]
                };
                if expected != got {
                    let (offset, bytes) = (part.start, part.len());
                    return Err(Turn::Corrupt(source, Differs { offset, bytes, expected, got }));
                }
            }
        }
        Ok(())
    }

    /// Our part; `false` when the buffers' locations do not allow it. All ranks decide from the same locations.
    ///
    /// # Safety
    /// As [`TwoShot::advance`]: all ranks have arrived.
    unsafe fn work(&self, board: &Board, task: &Task<'_>) -> Result<bool, Turn> {
        let plan = task.plan;
        let shape = &plan.shape;
        let (rank, ranks, root, bytes) = (board.rank(), board.ranks(), shape.root, plan.bytes());
        // All ranks name, and have, the same allocation. Only for buffers that every rank has.
        let common = |id: fn(&Place) -> u32| {
            let first = id(&self.places[0]);
            (first != 0 && self.places.iter().all(|p| id(p) == first)).then_some(first)
        };
        let (inputs, outputs) = (common(|p| p.input_id), common(|p| p.output_id));
        let input = |source: usize, segment: usize| {
            let segments = shape.input_segments(source);
            let place = self.input.as_ref()?.place(source, self.places[source].input, segments * bytes)?;
            Some(place.wrapping_add(segment * bytes).cast_const())
        };
        let output = |target: usize| {
            let segments = shape.output_segments(target);
            self.output.as_ref()?.place(target, self.places[target].output, segments * bytes)
        };
        let ours = task.buffers.output;
        // A location outside its region would be the peer's mistake. Every rank must then fall back, so all locations
        // are checked before anything is written.
        let inputs = inputs.filter(|_| (0..ranks).all(|r| input(r, 0).is_some()));
        let outputs = outputs.filter(|_| (0..ranks).all(|r| output(r).is_some()));
        // Complete where `inputs` holds.
        let all = |segment| (0..ranks).filter_map(move |r| input(r, segment));
        let sources = |segment| all(segment).map(Operand::input).collect::<Vec<_>>();
        let root_output = outputs.and_then(|_| self.output.as_ref()?.place(root, self.places[root].output, bytes));
        let streams = bytes.saturating_mul(shape.output_segments(root).max(1)) >= STREAM;
        // SAFETY: all locations were checked against their regions; ranks write disjoint parts, and read only unwritten
        // ones.
        unsafe {
            match shape.collective {
                Collective::AllReduce if inputs.is_some() && outputs.is_some() => {
                    let (sources, targets) = (sources(0), (0..ranks).filter_map(output).collect::<Vec<_>>());
                    self.compare(board, task, &sources, rank..rank + 1)?;
                    combine(plan, &sources, &targets, share(plan.count, plan.elem, rank, ranks), streams);
                }
                // Where no rank's result takes the place of an input that others read meanwhile.
                Collective::AllReduce if inputs.is_some_and(|id| self.places.iter().all(|p| p.output_id != id)) => {
                    let sources = sources(0);
                    self.compare(board, task, &sources, 0..ranks)?;
                    combine(plan, &sources, &[ours], 0..plan.count, streams);
                }
                Collective::ReduceScatter if inputs.is_some() => {
                    let sources = sources(rank);
                    self.compare(board, task, &sources, rank..rank + 1)?;
                    combine(plan, &sources, &[ours], 0..plan.count, streams);
                }
                Collective::Reduce if inputs.is_some() => match root_output {
                    // All ranks know the root's output, and each reduces its part into it.
                    Some(target) => {
                        let sources = sources(0);
                        self.compare(board, task, &sources, rank..rank + 1)?;
                        combine(plan, &sources, &[target], share(plan.count, plan.elem, rank, ranks), streams)
                    }
                    None if rank == root => {
                        let sources = sources(0);
                        self.compare(board, task, &sources, 0..ranks)?;
                        combine(plan, &sources, &[ours], 0..plan.count, streams);
                    }
                    None => {}
                },
                Collective::Gather if inputs.is_some() && rank != root => {}
                Collective::AllGather | Collective::Gather | Collective::AllToAll if inputs.is_some() => {
                    let segment = if shape.collective == Collective::AllToAll { rank } else { 0 };
                    // Each rank begins with its own memory, so that ranks do not all begin with the same target.
                    let sources: Vec<_> = all(segment).collect();
                    for source in (0..ranks).map(|i| (rank + i) % ranks) {
                        copy(sources[source], ours.wrapping_add(source * bytes), bytes, streams);
                    }
                }
                _ => return Ok(self.broadcast(board, task, inputs.is_some(), outputs.is_some(), streams)),
            }
        }
        Ok(true)
    }

    /// The root's input to all outputs; between two ranks each copies half.
    ///
    /// # Safety
    /// As [`TwoShot::work`].
    unsafe fn broadcast(&self, board: &Board, task: &Task<'_>, inputs: bool, outputs: bool, streams: bool) -> bool {
        let plan = task.plan;
        let (rank, ranks, root, bytes) = (board.rank(), board.ranks(), plan.shape.root, plan.bytes());
        let from = self.places[root];
        if plan.shape.collective != Collective::Broadcast || !outputs {
            return false;
        }
        // All ranks have the root's allocation if their outputs, or the buffers that they pass as input, lie in it.
        let holder = if inputs { &self.input } else { &self.output };
        let (Some(holder), Some(allocation)) = (holder, &self.output) else { return false };
        if !inputs && from.input_id != self.ours.output_id {
            return false;
        }
        let Some(source) = holder.place(root, from.input, bytes) else { return false };
        let places: Option<Vec<_>> = (0..ranks).map(|r| allocation.place(r, self.places[r].output, bytes)).collect();
        let Some(targets) = places else { return false };
        // SAFETY: checked against the regions; each byte of each output is written by one rank.
        unsafe {
            if ranks == 2 {
                let half = share(plan.count, plan.elem, rank, 2);
                let (start, len) = (half.start * plan.elem, half.len() * plan.elem);
                let to = targets[1 - root].wrapping_add(start);
                copy(source.wrapping_add(start), to, len, streams);
                if rank == root {
                    copy(source, targets[root], bytes, streams);
                }
            } else {
                copy(source, targets[rank], bytes, streams);
            }
        }
        true
    }
}
