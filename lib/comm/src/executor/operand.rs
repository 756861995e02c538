//! Reductions of what is ours with what came, of which those inputs are scaled first that the call wants scaled.

use super::plan::Plan;
use crate::reduce::{Operand, Piece, stream};

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
        match copy {
            None => reduce(plan, mine, other, out, n),
            Some(copy) if plan.average.scale.is_none() => {
                (plan.kernels.reduce_dual)(mine.at, other.at, out, copy, n);
            }
            Some(copy) => Piece::cut(n, plan.elem, |n, skip| {
                let out = out.wrapping_add(skip);
                reduce(plan, mine.skip(skip), other.skip(skip), out, n);
                out.copy_to_nonoverlapping(copy.wrapping_add(skip), n * plan.elem);
            }),
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
    let mut piece = Piece::new();
    let piece = piece.memory();
    Piece::cut(n, plan.elem, |n, skip| {
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
