//! One-shot: each rank with something to say writes it once, each rank takes what it needs from all the others' slots.
//!
//! One step whatever the number of ranks. Every reader does the whole reduction, which is why this is for small data.

use super::board::Board;
use super::call::{Call, Outcome, Turn};
use crate::algorithm::Shape;
use crate::transport::shm::{INLINE, pack};
use crate::transport::sync;
use crate::wire::Collective;

/// How far a rank is.
#[derive(Debug, Default)]
pub(super) struct OneShot {
    published: bool,
    /// Next rank to take from.
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

/// Whether `rank` writes its slot. In a reduction the root does, too: in place, its input is gone after the first step.
pub(super) fn writes(shape: &Shape, rank: usize) -> bool {
    match shape.collective {
        Collective::Broadcast | Collective::Scatter => rank == shape.root,
        Collective::Gather => rank != shape.root,
        _ => true,
    }
}

/// Whether `rank` takes from `source`'s slot.
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
    pub(super) unsafe fn advance(&mut self, board: &mut Board, call: &Call<'_>) -> Turn {
        let shape = &call.job.shape;
        let (rank, ranks) = (board.rank(), board.ranks());
        if !self.published {
            if writes(shape, rank) {
                let bytes = shape.input_segments(rank) * call.job.bytes();
                let missing = if bytes > INLINE { board.no_area(call.number) } else { board.no_line(call.number) };
                if let Some(turn) = missing {
                    return turn;
                }
                // SAFETY: by the caller the input holds all its segments; the choice of this algorithm has seen to it
                // that they fit into a slot.
                unsafe { publish(board, call) };
            }
            self.published = true;
        }
        while self.next < ranks {
            let source = self.next;
            if reads(shape, rank, source) {
                // Our own was written to memory that others write, too.
                if (source != rank || board.checks() && writes(shape, rank))
                    && let Err(turn) = call.message(board, source)
                {
                    return turn;
                }
                // SAFETY: the slots up to `source` are complete, and stay until we finish this call.
                unsafe { take(board, call, source) };
            }
            self.next += 1;
        }
        if call.job.divisor > 1 && (shape.collective != Collective::Reduce || rank == shape.root) {
            // SAFETY: the output holds one segment.
            unsafe { (call.job.kernels.divide)(call.buffers.output, call.job.count, call.job.divisor) };
        }
        if matches!(
            shape.collective,
            Collective::AllReduce
                | Collective::AllGather
                | Collective::ReduceScatter
                | Collective::AllToAll
                | Collective::Barrier
        ) {
            board.everyone_arrived(call.number);
        }
        board.finish(call.number);
        Turn::Ended(Outcome::Done)
    }
}

/// # Safety
/// As [`super::run`]; the input must fit into a slot.
#[inline]
unsafe fn publish(board: &Board, call: &Call<'_>) {
    let bytes = call.job.shape.input_segments(board.rank()) * call.job.bytes();
    // SAFETY: by the caller. Nobody reads the slot before it is published: there was credit.
    unsafe {
        if bytes <= INLINE {
            let inline = if bytes == 0 { [0; 3] } else { pack(std::slice::from_raw_parts(call.buffers.input, bytes)) };
            board.publish(call.number, &call.header, inline, 0);
        } else {
            let to = board.payload(board.rank(), call.number);
            sync::copy(call.buffers.input, to, bytes);
            board.publish(call.number, &call.header, [0; 3], bytes);
        }
    }
}

/// Takes `source`'s part of our result. Reductions go in rank order, from the first two ranks on.
///
/// # Safety
/// As [`super::run`]; the slots up to `source` must be complete.
#[inline]
unsafe fn take(board: &Board, call: &Call<'_>, source: usize) {
    let job = call.job;
    let (rank, bytes) = (board.rank(), job.bytes());
    let (skip_in, skip_out) = match job.shape.collective {
        Collective::ReduceScatter | Collective::Scatter => (rank * bytes, 0),
        Collective::AllGather | Collective::Gather => (0, source * bytes),
        Collective::AllToAll => (rank * bytes, source * bytes),
        _ => (0, 0),
    };
    if bytes == 0 {
        return;
    }
    let output = call.buffers.output.wrapping_add(skip_out);
    // SAFETY: by the caller; offsets stay below the buffers' sizes and the slot's payload.
    unsafe {
        let (mut words, mut others) = ([0; 3], [0; 3]);
        if !job.shape.collective.reduces() {
            let from = if source == rank { call.buffers.input } else { data(board, call, source, &mut words) };
            let from = from.wrapping_add(skip_in);
            if !std::ptr::eq(from, output) {
                sync::copy(from, output, bytes);
            }
            return;
        }
        match source {
            // With the next one.
            0 if board.ranks() > 1 => {}
            0 => std::ptr::copy(data(board, call, 0, &mut words).wrapping_add(skip_in), output, bytes),
            1 => {
                let first = data(board, call, 0, &mut words).wrapping_add(skip_in);
                let second = data(board, call, 1, &mut others).wrapping_add(skip_in);
                (job.kernels.reduce)(first, second, output, job.count);
            }
            _ => {
                let next = data(board, call, source, &mut words).wrapping_add(skip_in);
                (job.kernels.reduce)(output, next, output, job.count);
            }
        }
    }
}

/// The payload that `source` has published: in `words` when it is short. Ours, too, because in place the input is
/// overwritten before its turn comes.
///
/// # Safety
/// `source`'s slot must be complete.
#[inline]
unsafe fn data(board: &Board, call: &Call<'_>, source: usize, words: &mut [u64; 3]) -> *const u8 {
    if call.job.shape.input_segments(source) * call.job.bytes() <= INLINE {
        *words = board.read(source, call.number).inline;
        words.as_ptr().cast()
    } else {
        board.payload(source, call.number)
    }
}
