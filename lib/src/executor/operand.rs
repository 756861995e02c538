//! Reductions of what is ours with what came, of which those inputs are scaled first that the call wants scaled.

use std::mem::MaybeUninit;

use super::plan::Plan;
use crate::reduce::{Operand, stream};

/// Bytes of a piece, which stays in the L1 cache.
const PIECE: usize = 4 << 10;

#[repr(align(64))]
struct Piece(MaybeUninit<[u8; PIECE]>);

/// `out = mine op other` for `n` elements, and the same into `copy` if there is one. `out` may be either operand.
///
/// # Safety
/// As [`crate::reduce::ReduceDualFn`]; `copy` overlaps nothing.
#[inline]
pub(super) unsafe fn combine(
    plan: &Plan,
    mine: Operand,
    other: Operand,
    out: *mut u8,
    copy: Option<*mut u8>,
    n: usize,
) {
    // SAFETY: by the caller.
    unsafe {
        match (plan.average.scale.is_some() && (mine.input || other.input), copy) {
            (true, None) => reduce(plan, mine, other, out, n),
            (true, Some(copy)) => in_pieces(plan, n, |n, skip| {
                let out = out.wrapping_add(skip);
                reduce(plan, mine.skip(skip), other.skip(skip), out, n);
                out.copy_to_nonoverlapping(copy.wrapping_add(skip), n * plan.elem);
            }),
            (false, None) => (plan.kernels.reduce)(mine.at, other.at, out, n),
            (false, Some(copy)) => (plan.kernels.reduce_dual)(mine.at, other.at, out, copy, n),
        }
    }
}

/// [`combine`] without a copy.
///
/// # Safety
/// As [`crate::reduce::ReduceFn`].
#[inline]
unsafe fn reduce(plan: &Plan, mine: Operand, other: Operand, out: *mut u8, n: usize) {
    // SAFETY: by the caller.
    unsafe {
        match &plan.average.scale {
            Some(scale) if mine.input || other.input => scale.sum(mine, other, out, n, plan.elem),
            _ => (plan.kernels.reduce)(mine.at, other.at, out, n),
        }
    }
}

/// Calls `work` for pieces of `n` elements, with their number and the bytes before them.
fn in_pieces(plan: &Plan, n: usize, mut work: impl FnMut(usize, usize)) {
    let step = PIECE / plan.elem;
    (0..n).step_by(step).for_each(|start| work(step.min(n - start), start * plan.elem));
}

/// [`combine`] with `out` written around the cache; the same through the cache into `slot`, if there is one, for the
/// receiver.
///
/// # Safety
/// As [`crate::reduce::ReduceDualFn`], or [`crate::reduce::ReduceFn`] without a slot.
pub(super) unsafe fn reduce_and_stream(
    plan: &Plan,
    mine: Operand,
    other: Operand,
    slot: Option<*mut u8>,
    out: *mut u8,
    n: usize,
) {
    let mut piece = Piece(MaybeUninit::uninit());
    let piece = piece.0.as_mut_ptr().cast::<u8>();
    in_pieces(plan, n, |n, skip| {
        let through = slot.map_or(piece, |slot| slot.wrapping_add(skip));
        // SAFETY: by the caller; the piece holds `n` elements.
        unsafe {
            reduce(plan, mine.skip(skip), other.skip(skip), through, n);
            stream::copy_unordered(out.add(skip), through, n * plan.elem);
        }
    });
    stream::fence();
}

/// Ends a step that completes a reduction where `last` says so.
///
/// # Safety
/// `out` must be valid for `n` elements of the plan's type.
#[inline]
pub(super) unsafe fn finish(plan: &Plan, last: bool, out: *mut u8, n: usize) {
    if last && let Some(division) = &plan.average.division {
        // SAFETY: by the caller.
        unsafe { division.apply(out, n) };
    }
}
