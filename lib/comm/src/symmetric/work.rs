//! Reducing and copying between mapped buffers.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::task::Plan;
use crate::reduce::{Operand, stream};
use tinynccl_sys::sync;

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
    sources: &[Operand],
    targets: &[*mut u8],
    range: Range<usize>,
    streams: bool,
) {
    let elem = plan.elem;
    let skip = range.start * elem;
    // SAFETY: by the caller; pieces lie within the range.
    unsafe {
        let average = &plan.average;
        let sum = |a: Operand, b: Operand, out, n| match &average.scale {
            Some(scale) => scale.sum(a, b, out, n, elem),
            None => (plan.kernels.reduce)(a.at, b.at, out, n),
        };
        if let ([a, b], false, None) = (sources, streams, &average.division) {
            let (a, b) = (a.skip(skip), b.skip(skip));
            match (targets, &average.scale) {
                ([x], _) => return sum(a, b, x.wrapping_add(skip), range.len()),
                ([x, y], None) => {
                    let (x, y) = (x.wrapping_add(skip), y.wrapping_add(skip));
                    return (plan.kernels.reduce_dual)(a.at, b.at, x, y, range.len());
                }
                _ => {}
            }
        }
        let mut piece = MaybeUninit::<[u64; PIECE / 8]>::uninit();
        let piece = piece.as_mut_ptr().cast::<u8>();
        let step = PIECE / elem;
        let mut places = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let n = step.min(range.end - at);
            let source = |i: usize| sources[i].skip(at * elem);
            if let Some(exact) = &plan.exact {
                places.clear();
                places.extend(sources.iter().map(|source| source.skip(at * elem).at));
                // Straight into the first target, unless that is to stay out of the cache.
                let (first, others) = match targets {
                    [first, others @ ..] if !streams => (first.wrapping_add(at * elem), others),
                    _ => (piece, targets),
                };
                exact.sum(&places, first, n);
                for target in others {
                    copy(first, target.wrapping_add(at * elem), n * elem, streams);
                }
                at += n;
                continue;
            }
            match (sources.len(), &average.scale) {
                (1, Some(scale)) if sources[0].input => scale.apply(source(0).at, piece, n),
                (1, _) => copy(source(0).at, piece, n * elem, false),
                _ => sum(source(0), source(1), piece, n),
            }
            for i in 2..sources.len() {
                sum(Operand::product(piece), source(i), piece, n);
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
