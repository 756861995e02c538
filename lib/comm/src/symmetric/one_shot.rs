//! One-shot: each rank writes its input once, and reads what it needs from all the others' slots.
//!
//! It takes one step for any number of ranks. Every reader does the whole reduction, so this is for small data.

use super::board::Board;
use super::task::Task;
use super::turn::{Outcome, Turn};
use super::work::publish_input;
use crate::reduce::Exact;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::wire::Collective;
use tinynccl_sys::sync;
use tinynccl_transport::shm::{INLINE, pack};

/// Progress of a rank in a one-shot call.
#[derive(Debug, Default)]
pub(super) struct OneShot {
    published: bool,
    /// Next rank to read from.
    next: usize,
}

/// Bytes that a rank writes into its slot, the largest over the ranks.
pub(crate) fn slot_bytes(shape: &Shape, segment: usize) -> usize {
    let segments = match shape.collective {
        Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => shape.ranks,
        _ => 1,
    };
    segments.saturating_mul(segment)
}

/// True if `rank` writes its slot. In a reduction the root does, too: in place, the first step overwrites its input.
pub(super) fn writes(shape: &Shape, rank: usize) -> bool {
    match shape.collective {
        Collective::Broadcast | Collective::Scatter => rank == shape.root,
        Collective::Gather => rank != shape.root,
        _ => true,
    }
}

/// True if `rank` takes from `source`'s slot.
fn reads(shape: &Shape, rank: usize, source: usize) -> bool {
    match shape.collective {
        Collective::Broadcast | Collective::Scatter => source == shape.root,
        Collective::Reduce | Collective::Gather => rank == shape.root,
        _ => true,
    }
}

impl OneShot {
    /// # Safety
    /// As [`super::run`].
    #[inline]
    pub(super) unsafe fn advance(&mut self, board: &mut Board, task: &Task<'_>) -> Turn {
        let shape = &task.plan.shape;
        let (rank, ranks) = (board.rank(), board.ranks());
        if !self.published {
            if writes(shape, rank) {
                let bytes = shape.input_segments(rank) * task.plan.bytes();
                let missing = if bytes > INLINE { board.no_area(task.number) } else { board.no_line(task.number) };
                if let Some(turn) = missing {
                    return turn;
                }
                // SAFETY: by the caller the input holds all its segments; this algorithm is only chosen if they fit
                // into a slot.
                unsafe { publish(board, task) };
            }
            self.published = true;
        }
        while self.next < ranks {
            let source = self.next;
            if reads(shape, rank, source) {
                // Our own was written to memory that others write, too.
                if (source != rank || board.verifies(&task.header) && writes(shape, rank))
                    && let Err(turn) = task.message(board, source)
                {
                    return turn;
                }
                // SAFETY: the slots up to `source` are complete, and stay until we finish this call.
                unsafe { take(board, task, source) };
            }
            self.next += 1;
        }
        if let Some(exact) = &task.plan.exact
            && shape.output_segments(rank) > 0
        {
            // SAFETY: all slots are complete, and stay until we finish this call.
            unsafe { add_at_once(board, task, exact) };
        }
        if let Some(division) = &task.plan.average.division
            && (shape.collective != Collective::Reduce || rank == shape.root)
        {
            // SAFETY: the output holds one segment.
            unsafe { division.apply(task.buffers.output, task.plan.count) };
        }
        if matches!(
            shape.collective,
            Collective::AllReduce
                | Collective::AllGather
                | Collective::ReduceScatter
                | Collective::AllToAll
                | Collective::Barrier
        ) {
            board.everyone_arrived(task.number);
        }
        board.finish(task.number);
        Turn::Ended(Outcome::Done)
    }
}

/// # Safety
/// As [`super::run`]; the input must fit into a slot.
#[inline]
unsafe fn publish(board: &Board, task: &Task<'_>) {
    let plan = task.plan;
    let count = plan.shape.input_segments(board.rank()) * plan.count;
    let bytes = count * plan.elem;
    // SAFETY: by the caller. No rank reads the slot before it is published: there was credit.
    unsafe {
        if bytes <= INLINE {
            let inline = match &plan.average.scale {
                _ if bytes == 0 => [0; 3],
                // Apart from what is not scaled, which stays in registers.
                Some(scale) => {
                    let mut inline = [0; 3];
                    scale.apply(task.buffers.input, inline.as_mut_ptr().cast(), count);
                    inline
                }
                None => pack(std::slice::from_raw_parts(task.buffers.input, bytes)),
            };
            board.publish(task.number, &task.header, inline, 0);
        } else {
            publish_input(plan, task.buffers.input, board.payload(board.rank(), task.number), count);
            board.publish(task.number, &task.header, [0; 3], bytes);
        }
    }
}

/// Reads `source`'s part of our result. Reductions go in rank order, from the first two ranks on.
///
/// # Safety
/// As [`super::run`]; the slots up to `source` must be complete.
#[inline]
unsafe fn take(board: &Board, task: &Task<'_>, source: usize) {
    let plan = task.plan;
    let (rank, bytes) = (board.rank(), plan.bytes());
    let (skip_in, skip_out) = match plan.shape.collective {
        Collective::ReduceScatter | Collective::Scatter => (rank * bytes, 0),
        Collective::AllGather | Collective::Gather => (0, source * bytes),
        Collective::AllToAll => (rank * bytes, source * bytes),
        _ => (0, 0),
    };
    if bytes == 0 || plan.exact.is_some() {
        return;
    }
    let output = task.buffers.output.wrapping_add(skip_out);
    // SAFETY: by the caller; offsets stay below the buffers' sizes and the slot's payload.
    unsafe {
        let (mut words, mut others) = ([0; 3], [0; 3]);
        if !plan.shape.collective.reduces() {
            let from = if source == rank { task.buffers.input } else { data(board, task, source, &mut words) };
            let from = from.wrapping_add(skip_in);
            if !std::ptr::eq(from, output) {
                sync::copy(from, output, bytes);
            }
            return;
        }
        match source {
            // With the next one.
            0 if board.ranks() > 1 => {}
            0 => std::ptr::copy(data(board, task, 0, &mut words).wrapping_add(skip_in), output, bytes),
            1 => {
                let first = data(board, task, 0, &mut words).wrapping_add(skip_in);
                let second = data(board, task, 1, &mut others).wrapping_add(skip_in);
                (plan.kernels.reduce)(first, second, output, plan.count);
            }
            _ => {
                let next = data(board, task, source, &mut words).wrapping_add(skip_in);
                (plan.kernels.reduce)(output, next, output, plan.count);
            }
        }
    }
}

/// The exact sum of all ranks' slots.
///
/// # Safety
/// As [`super::run`]; all slots must be complete.
unsafe fn add_at_once(board: &Board, task: &Task<'_>, exact: &Exact) {
    let plan = task.plan;
    let mut words = vec![[0; 3]; board.ranks()];
    let skip = if plan.shape.collective == Collective::ReduceScatter { board.rank() * plan.bytes() } else { 0 };
    // SAFETY: by the caller; offsets stay below the slot's payload.
    let place =
        |(source, words): (usize, &mut [u64; 3])| unsafe { data(board, task, source, words) }.wrapping_add(skip);
    let places: Vec<_> = words.iter_mut().enumerate().map(place).collect();
    // SAFETY: by the caller; slots are apart from the output.
    unsafe { exact.sum(&places, task.buffers.output, plan.count) };
}

/// The payload that `source` has published: in `words` when it is short. Ours is read here, too, because in place the
/// input is overwritten before our rank comes in the order.
///
/// # Safety
/// `source`'s slot must be complete.
#[inline]
unsafe fn data(board: &Board, task: &Task<'_>, source: usize, words: &mut [u64; 3]) -> *const u8 {
    if task.plan.shape.input_segments(source) * task.plan.bytes() <= INLINE {
        *words = board.read(source, task.number).inline;
        words.as_ptr().cast()
    } else {
        board.payload(source, task.number)
    }
}
