//! Reducing and copying between mapped buffers.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::task::Plan;
use crate::reduce::stream;
use crate::sync;

/// Reductions of more than two ranks go through a block of this many bytes that stays in the L1 cache.
const PIECE: usize = 8 << 10;

/// `rank`'s part of `count` elements: in whole cache lines, as far as they go.
pub(super) fn share(count: usize, elem: usize, rank: usize, ranks: usize) -> Range<usize> {
    let part = count.div_ceil(ranks).next_multiple_of(line(elem));
    (rank * part).min(count)..((rank + 1) * part).min(count)
}

/// Elements of a cache line.
pub(super) fn line(elem: usize) -> usize {
    (64 / elem).max(1)
}

/// An operand of a reduction.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// A rank's input, which an average of floats scales.
    Input(*const u8),
    /// The same, scaled already where it had to be.
    Ready(*const u8),
}

/// Reduces the elements of `range` of all sources, in their order, into all targets.
///
/// # Safety
/// Sources readable, targets writable for the range; a target is a source or apart from all.
pub(super) unsafe fn combine(plan: &Plan, sources: &[Source], targets: &[*mut u8], range: Range<usize>, streams: bool) {
    let elem = plan.elem;
    let skip = range.start * elem;
    // SAFETY: by the caller; pieces lie within the range.
    unsafe {
        let average = &plan.average;
        if let ([Source::Input(a) | Source::Ready(a), Source::Input(b) | Source::Ready(b)], false) = (sources, streams)
            && average.scale.is_none()
            && average.division.is_none()
        {
            let (a, b) = (a.wrapping_add(skip), b.wrapping_add(skip));
            match targets {
                [x] => (plan.kernels.reduce)(a, b, x.wrapping_add(skip), range.len()),
                [x, y] => {
                    (plan.kernels.reduce_dual)(a, b, x.wrapping_add(skip), y.wrapping_add(skip), range.len());
                }
                _ => {}
            }
            return;
        }
        let (mut piece, mut scaled) =
            (MaybeUninit::<[u64; PIECE / 8]>::uninit(), MaybeUninit::<[u64; PIECE / 8]>::uninit());
        let (piece, scaled) = (piece.as_mut_ptr().cast::<u8>(), scaled.as_mut_ptr().cast::<u8>());
        let step = PIECE / elem;
        let mut at = range.start;
        while at < range.end {
            let n = step.min(range.end - at);
            // The operand; scaled into `room` where that is needed.
            let source = |i: usize, room: *mut u8| match (sources[i], &average.scale) {
                (Source::Input(from), Some(scale)) => {
                    scale.apply(from.wrapping_add(at * elem), room, n);
                    room.cast_const()
                }
                (Source::Input(from) | Source::Ready(from), _) => from.wrapping_add(at * elem),
            };
            let first = source(0, piece);
            if sources.len() == 1 {
                copy(first, piece, n * elem, false);
            } else {
                (plan.kernels.reduce)(first, source(1, scaled), piece, n);
            }
            for i in 2..sources.len() {
                (plan.kernels.reduce)(piece, source(i, scaled), piece, n);
            }
            if let Some(division) = &average.division {
                division.apply(piece, n);
            }
            for target in targets {
                copy(piece, target.wrapping_add(at * elem), n * elem, streams);
            }
            at += n;
        }
    }
}

/// Copies `count` elements of a rank's input to memory that the others read, scaled where an average needs it.
///
/// # Safety
/// Valid for `count` elements; apart.
pub(super) unsafe fn publish_input(plan: &Plan, input: *const u8, to: *mut u8, count: usize) {
    // SAFETY: by the caller.
    unsafe {
        match &plan.average.scale {
            Some(scale) => scale.apply(input, to, count),
            None => sync::copy(input, to, count * plan.elem),
        }
    }
}

/// The fence at the end of the work orders streamed stores.
///
/// # Safety
/// Valid for `bytes`; equal or apart.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, streams: bool) {
    if !std::ptr::eq(from, to) {
        // SAFETY: by the caller.
        unsafe {
            if streams {
                stream::copy_unordered(to, from, bytes);
            } else {
                sync::copy(from, to, bytes);
            }
        }
    }
}
