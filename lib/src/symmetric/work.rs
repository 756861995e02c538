//! Reducing and copying between mapped buffers.

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

/// Reduces the elements of `range` of all sources, in their order, into all targets.
///
/// # Safety
/// Sources readable, targets writable for the range; a target is a source or apart from all.
pub(super) unsafe fn combine(
    plan: &Plan,
    sources: &[*const u8],
    targets: &[*mut u8],
    range: Range<usize>,
    streams: bool,
) {
    let elem = plan.elem;
    let skip = range.start * elem;
    // SAFETY: by the caller; pieces lie within the range.
    unsafe {
        if let ([a, b], false, 1) = (sources, streams, plan.divisor) {
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
        let mut piece = [0u64; PIECE / 8];
        let piece = piece.as_mut_ptr().cast::<u8>();
        let step = PIECE / elem;
        let mut at = range.start;
        while at < range.end {
            let n = step.min(range.end - at);
            let source = |i: usize| sources[i].wrapping_add(at * elem);
            if sources.len() == 1 {
                sync::copy(source(0), piece, n * elem);
            } else {
                (plan.kernels.reduce)(source(0), source(1), piece, n);
            }
            for i in 2..sources.len() {
                (plan.kernels.reduce)(piece, source(i), piece, n);
            }
            (plan.kernels.divide)(piece, n, plan.divisor);
            for target in targets {
                copy(piece, target.wrapping_add(at * elem), n * elem, streams);
            }
            at += n;
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
