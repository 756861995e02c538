//! The loops, written once and compiled for each instruction set.
//!
//! The compiler vectorises them. It can only do so where a store cannot reach a later load, so a result in the place of
//! an operand has a loop of its own, over two buffers instead of three.

use std::mem::MaybeUninit;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::ops::{Divide, Lane, Map, Op};
use super::{DivideFn, Level, ReduceDualFn, ReduceFn};

/// `buf[i] = buf[i] op buf[i]` through the function of two buffers. Nobody does this for speed, so that no loop of its own
/// is compiled for it.
///
/// # Safety
/// `buf` is readable and writable for `n` elements of `size` bytes (at most 8), which are what `reduce` works on.
#[cold]
unsafe fn reduce_with_itself(buf: *mut u8, n: usize, size: usize, reduce: ReduceFn) {
    let mut stage = [0u64; 128];
    let step = size_of_val(&stage) / size;
    let stage = stage.as_mut_ptr().cast::<u8>();
    for at in (0..n).step_by(step) {
        let part = step.min(n - at);
        // SAFETY: a part of the caller's buffer, and of the stage, which is apart from it.
        unsafe {
            let buf = buf.add(at * size);
            buf.copy_to_nonoverlapping(stage, part * size);
            reduce(buf, stage, buf, part);
        }
    }
}

/// [`ReduceFn`] for one lane type and operator. `single`: the function that this is inlined into.
#[inline(always)]
unsafe fn reduce<L: Lane, O: Op<L>>(a: *const u8, b: *const u8, out: *mut u8, n: usize, single: ReduceFn) {
    if n == 0 {
        return;
    }
    if a == b && out.cast_const() == a {
        // SAFETY: the caller's promise, passed on.
        return unsafe { reduce_with_itself(out, n, size_of::<L>() / L::ELEMENTS, single) };
    }
    // The operator is commutative: where the result replaces an operand, let that be `a`.
    let (a, b) = if out.cast_const() == b { (b, a) } else { (a, b) };
    let lanes = n / L::ELEMENTS;
    // SAFETY: the caller's buffers hold `n` elements, which is at least `lanes` lanes; lanes are aligned like elements;
    // `out` is `a` or overlaps neither.
    unsafe {
        if out.cast_const() != a {
            let (a, b) = (from_raw_parts(a.cast::<L>(), lanes), from_raw_parts(b.cast::<L>(), lanes));
            let out = from_raw_parts_mut(out.cast::<MaybeUninit<L>>(), lanes);
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                out.write(O::apply(a, b));
            }
        } else {
            let (out, b) = (from_raw_parts_mut(out.cast::<L>(), lanes), from_raw_parts(b.cast::<L>(), lanes));
            for (out, &b) in out.iter_mut().zip(b) {
                *out = O::apply(*out, b);
            }
        }
        if !n.is_multiple_of(L::ELEMENTS) {
            let at = lanes * size_of::<L>();
            let last = O::apply(read_part(a.add(at), n), read_part(b.add(at), n));
            write_part(out.add(at), n, last);
        }
    }
}

/// [`ReduceDualFn`] for one lane type and operator. `single`: the same with one result.
#[inline(always)]
unsafe fn reduce_dual<L: Lane, O: Op<L>>(
    a: *const u8,
    b: *const u8,
    out: *mut u8,
    copy: *mut u8,
    n: usize,
    single: ReduceFn,
) {
    if n == 0 {
        return;
    }
    let replaces = |out: *mut u8| out.cast_const() == a || out.cast_const() == b;
    // If only one result replaces an operand, let it be `out`, and that operand `a`.
    let (out, copy) = if replaces(copy) { (copy, out) } else { (out, copy) };
    let lanes = n / L::ELEMENTS;
    // SAFETY: as in `reduce`; in the loops `copy` overlaps nothing, since both results in the place of operands (or of
    // each other) is the case before them.
    unsafe {
        if replaces(copy) || out == copy || a == b {
            single(a, b, out, n);
            if out != copy {
                out.copy_to_nonoverlapping(copy, n * size_of::<L>() / L::ELEMENTS);
            }
            return;
        }
        let (a, b) = if out.cast_const() == b { (b, a) } else { (a, b) };
        let second = from_raw_parts_mut(copy.cast::<MaybeUninit<L>>(), lanes);
        if out.cast_const() != a {
            let (a, b) = (from_raw_parts(a.cast::<L>(), lanes), from_raw_parts(b.cast::<L>(), lanes));
            let out = from_raw_parts_mut(out.cast::<MaybeUninit<L>>(), lanes);
            for (((out, copy), &a), &b) in out.iter_mut().zip(second).zip(a).zip(b) {
                let value = O::apply(a, b);
                out.write(value);
                copy.write(value);
            }
        } else {
            let (out, b) = (from_raw_parts_mut(out.cast::<L>(), lanes), from_raw_parts(b.cast::<L>(), lanes));
            for ((out, copy), &b) in out.iter_mut().zip(second).zip(b) {
                *out = O::apply(*out, b);
                copy.write(*out);
            }
        }
        if !n.is_multiple_of(L::ELEMENTS) {
            let at = lanes * size_of::<L>();
            let last = O::apply(read_part(a.add(at), n), read_part(b.add(at), n));
            write_part(out.add(at), n, last);
            write_part(copy.add(at), n, last);
        }
    }
}

/// `buf[i] = f(buf[i])` for `n` elements.
///
/// # Safety
/// As [`DivideFn`].
#[inline(always)]
pub(super) unsafe fn map_in_place<L: Lane, F: Map<L>>(buf: *mut u8, n: usize, f: &F) {
    if n == 0 {
        return;
    }
    let lanes = n / L::ELEMENTS;
    // SAFETY: the caller's buffer holds `n` elements, which is at least `lanes` lanes.
    unsafe {
        for x in from_raw_parts_mut(buf.cast::<L>(), lanes) {
            *x = f.map(*x);
        }
        if !n.is_multiple_of(L::ELEMENTS) {
            let rest = buf.add(lanes * size_of::<L>());
            write_part(rest, n, f.map(read_part(rest, n)));
        }
    }
}

/// The `n % ELEMENTS` elements at `at`, in a lane filled up with zeros.
///
/// # Safety
/// `at` is readable for that many elements.
#[inline(always)]
unsafe fn read_part<L: Lane>(at: *const u8, n: usize) -> L {
    let mut lane = MaybeUninit::<L>::zeroed();
    // SAFETY: less than a lane is copied, and any bits are a valid lane.
    unsafe {
        at.copy_to_nonoverlapping(lane.as_mut_ptr().cast(), part_bytes::<L>(n));
        lane.assume_init()
    }
}

/// The first `n % ELEMENTS` elements of `lane` to `at`.
///
/// # Safety
/// `at` is writable for that many elements.
#[inline(always)]
unsafe fn write_part<L: Lane>(at: *mut u8, n: usize, lane: L) {
    // SAFETY: less than a lane is copied, out of a local.
    unsafe { at.copy_from_nonoverlapping((&raw const lane).cast(), part_bytes::<L>(n)) }
}

#[inline(always)]
const fn part_bytes<L: Lane>(n: usize) -> usize {
    n % L::ELEMENTS * (size_of::<L>() / L::ELEMENTS)
}

/// [`DivideFn`] for one lane type.
#[inline(always)]
unsafe fn divide<D: Divide>(buf: *mut u8, n: usize, divisor: usize) {
    if divisor > 1 {
        // SAFETY: the caller's promise, passed on.
        unsafe { D::divide(buf, n, divisor) }
    }
}

/// One module per instruction set: the three loops under its features.
macro_rules! level {
    ($name:ident $(, $features:literal)?) => {
        pub(super) mod $name {
            use super::{Divide, Lane, Op, ReduceDualFn, ReduceFn};

            /// The two reductions of (lane, operator).
            pub(in super::super) fn pair<L: Lane, O: Op<L>>() -> (ReduceFn, ReduceDualFn) {
                (reduce::<L, O>, reduce_dual::<L, O>)
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn reduce<L: Lane, O: Op<L>>(a: *const u8, b: *const u8, out: *mut u8, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce::<L, O>(a, b, out, n, reduce::<L, O>) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn reduce_dual<L: Lane, O: Op<L>>(
                a: *const u8,
                b: *const u8,
                out: *mut u8,
                copy: *mut u8,
                n: usize,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce_dual::<L, O>(a, b, out, copy, n, reduce::<L, O>) }
            }

            $(#[target_feature(enable = $features)])?
            pub(in super::super) unsafe fn divide<D: Divide>(buf: *mut u8, n: usize, divisor: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::divide::<D>(buf, n, divisor) }
            }
        }
    };
}
level!(baseline);
#[cfg(target_arch = "x86_64")]
level!(avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

/// The two reductions of (lane, operator) for `level`, which the machine must have when they are called.
pub(super) fn reduce_at<L: Lane, O: Op<L>>(level: Level) -> (ReduceFn, ReduceDualFn) {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::pair::<L, O>(),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::pair::<L, O>(),
        _ => baseline::pair::<L, O>(),
    }
}

/// The division of a lane type for `level`, which the machine must have when it is called.
pub(super) fn divide_at<D: Divide>(level: Level) -> DivideFn {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::divide::<D>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::divide::<D>,
        _ => baseline::divide::<D>,
    }
}
