//! Reductions with an operand of our own. Where the call scales its inputs, such an operand is scaled first, in pieces
//! that stay in the L1 cache.

use std::mem::MaybeUninit;

use super::plan::{Place, Plan};
use crate::reduce::stream;

/// Bytes of a piece.
const PIECE: usize = 4 << 10;

#[repr(align(64))]
struct Piece(MaybeUninit<[u8; PIECE]>);

impl Piece {
    fn new() -> Piece {
        Piece(MaybeUninit::uninit())
    }

    fn memory(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

/// `out = mine op other` for `n` elements, and the same into `copy` if there is one; `mine` is what lies at `src`. `out`
/// may be either operand.
///
/// # Safety
/// As [`crate::reduce::ReduceDualFn`]; `copy` overlaps nothing.
#[inline]
pub(super) unsafe fn combine(
    plan: &Plan,
    src: Place,
    mine: *const u8,
    other: *const u8,
    out: *mut u8,
    copy: Option<*mut u8>,
    n: usize,
) {
    let reduce = |mine: *const u8, skip: usize, n: usize| {
        let (other, out) = (other.wrapping_add(skip), out.wrapping_add(skip));
        // SAFETY: by the caller; `skip` is below `n` elements.
        unsafe {
            match copy {
                Some(copy) => (plan.kernels.reduce_dual)(mine, other, out, copy.wrapping_add(skip), n),
                None => (plan.kernels.reduce)(mine, other, out, n),
            }
        }
    };
    let Some(scale) = plan.scale(src) else { return reduce(mine, 0, n) };
    let mut piece = Piece::new();
    let piece = piece.memory();
    let step = PIECE / plan.elem;
    for start in (0..n).step_by(step) {
        let (n, skip) = (step.min(n - start), start * plan.elem);
        // SAFETY: by the caller; the piece holds `n` elements, which are read before `out` is written.
        unsafe { scale.apply(mine.add(skip), piece, n) };
        reduce(piece, skip, n);
    }
}

/// [`combine`] with `out` written around the cache; the same through the cache into `slot`, if there is one, for the
/// receiver.
///
/// # Safety
/// As [`crate::reduce::ReduceDualFn`], or [`crate::reduce::ReduceFn`] without a slot.
pub(super) unsafe fn reduce_and_stream(
    plan: &Plan,
    src: Place,
    mine: *const u8,
    other: *const u8,
    slot: Option<*mut u8>,
    out: *mut u8,
    n: usize,
) {
    let (mut piece, mut scaled) = (Piece::new(), Piece::new());
    let (piece, scaled) = (piece.memory(), scaled.memory());
    let step = PIECE / plan.elem;
    for start in (0..n).step_by(step) {
        let (n, skip) = (step.min(n - start), start * plan.elem);
        // SAFETY: by the caller; the pieces hold `n` elements.
        unsafe {
            let mut mine = mine.add(skip);
            if let Some(scale) = plan.scale(src) {
                scale.apply(mine, scaled, n);
                mine = scaled;
            }
            let through = slot.map_or(piece, |slot| slot.add(skip));
            (plan.kernels.reduce)(mine, other.add(skip), through, n);
            stream::copy_unordered(out.add(skip), through, n * plan.elem);
        }
    }
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
