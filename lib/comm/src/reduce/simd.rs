//! The loops, written once and compiled for each instruction set.
//!
//! The compiler vectorises them. It can only do so where a store cannot reach a later load, so a result in the place of
//! an operand has a separate loop, over two buffers instead of three.

use std::mem::MaybeUninit;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::exact::{Element, ExactFn};
use super::ops::{Divide, Map, Op, Scaled, Sum, Unit};
use super::{DivideFn, Level, ReduceDualFn, ReduceFn, ScaleFn, ScaledSumFn};

/// `buf[i] = buf[i] op buf[i]` through the function of two buffers. No caller does this for speed, so that no separate
/// loop is compiled for it.
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

/// [`ReduceFn`] for one unit type and operator. `single`: the function that this is inlined into.
#[inline(always)]
unsafe fn reduce<U: Unit, O: Op<U>>(a: *const u8, b: *const u8, out: *mut u8, n: usize, single: ReduceFn) {
    if n == 0 {
        return;
    }
    if a == b && out.cast_const() == a {
        // SAFETY: the caller's promise, passed on.
        return unsafe { reduce_with_itself(out, n, size_of::<U>() / U::ELEMENTS, single) };
    }
    // The operator is commutative: where the result replaces an operand, let that be `a`.
    let (a, b) = if out.cast_const() == b { (b, a) } else { (a, b) };
    // SAFETY: the caller's promise, passed on.
    unsafe { combine(a, b, out, n, O::apply) }
}

/// `out[i] = f(a[i], b[i])` for `n` elements. `out` may be exactly `a`; no other overlap.
///
/// # Safety
/// As [`ReduceFn`], with at least one element.
#[inline(always)]
unsafe fn combine<U: Unit>(a: *const u8, b: *const u8, out: *mut u8, n: usize, f: impl Fn(U, U) -> U) {
    let units = n / U::ELEMENTS;
    // SAFETY: the caller's buffers hold `n` elements, which is at least `units` units; units are aligned like elements;
    // `out` is `a` or overlaps neither.
    unsafe {
        if out.cast_const() != a {
            let (a, b) = (from_raw_parts(a.cast::<U>(), units), from_raw_parts(b.cast::<U>(), units));
            let out = from_raw_parts_mut(out.cast::<MaybeUninit<U>>(), units);
            for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
                out.write(f(a, b));
            }
        } else {
            let (out, b) = (from_raw_parts_mut(out.cast::<U>(), units), from_raw_parts(b.cast::<U>(), units));
            for (out, &b) in out.iter_mut().zip(b) {
                *out = f(*out, b);
            }
        }
        if !n.is_multiple_of(U::ELEMENTS) {
            let at = units * size_of::<U>();
            let last = f(read_part(a.add(at), n), read_part(b.add(at), n));
            write_part(out.add(at), n, last);
        }
    }
}

/// [`ReduceDualFn`] for one unit type and operator. `single`: the same with one result.
#[inline(always)]
unsafe fn reduce_dual<U: Unit, O: Op<U>>(
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
    let units = n / U::ELEMENTS;
    // SAFETY: as in `reduce`; in the loops `copy` overlaps nothing, since both results in the place of operands (or of
    // each other) is the case before them.
    unsafe {
        if replaces(copy) || out == copy || a == b {
            single(a, b, out, n);
            if out != copy {
                out.copy_to_nonoverlapping(copy, n * size_of::<U>() / U::ELEMENTS);
            }
            return;
        }
        let (a, b) = if out.cast_const() == b { (b, a) } else { (a, b) };
        let second = from_raw_parts_mut(copy.cast::<MaybeUninit<U>>(), units);
        if out.cast_const() != a {
            let (a, b) = (from_raw_parts(a.cast::<U>(), units), from_raw_parts(b.cast::<U>(), units));
            let out = from_raw_parts_mut(out.cast::<MaybeUninit<U>>(), units);
            for (((out, copy), &a), &b) in out.iter_mut().zip(second).zip(a).zip(b) {
                let value = O::apply(a, b);
                out.write(value);
                copy.write(value);
            }
        } else {
            let (out, b) = (from_raw_parts_mut(out.cast::<U>(), units), from_raw_parts(b.cast::<U>(), units));
            for ((out, copy), &b) in out.iter_mut().zip(second).zip(b) {
                *out = O::apply(*out, b);
                copy.write(*out);
            }
        }
        if !n.is_multiple_of(U::ELEMENTS) {
            let at = units * size_of::<U>();
            let last = O::apply(read_part(a.add(at), n), read_part(b.add(at), n));
            write_part(out.add(at), n, last);
            write_part(copy.add(at), n, last);
        }
    }
}

/// `to[i] = f(from[i])` for `n` elements.
///
/// # Safety
/// As [`ScaleFn`].
#[inline(always)]
pub(super) unsafe fn map<U: Unit, F: Map<U>>(from: *const u8, to: *mut u8, n: usize, f: &F) {
    if n == 0 {
        return;
    }
    let units = n / U::ELEMENTS;
    // SAFETY: the caller's buffers hold `n` elements, which is at least `units` units; they are one or apart.
    unsafe {
        if to.cast_const() == from {
            for x in from_raw_parts_mut(to.cast::<U>(), units) {
                *x = f.map(*x);
            }
        } else {
            let from = from_raw_parts(from.cast::<U>(), units);
            let to = from_raw_parts_mut(to.cast::<MaybeUninit<U>>(), units);
            for (to, &x) in to.iter_mut().zip(from) {
                to.write(f.map(x));
            }
        }
        if !n.is_multiple_of(U::ELEMENTS) {
            let at = units * size_of::<U>();
            write_part(to.add(at), n, f.map(read_part(from.add(at), n)));
        }
    }
}

/// [`ScaledSumFn`] for one unit type.
#[inline(always)]
unsafe fn scaled_sum<S: Scaled>(a: *const u8, b: *const u8, out: *mut u8, n: usize, factors: [f64; 2])
where
    Sum: Op<S>,
{
    if n == 0 {
        return;
    }
    // Where the result replaces an operand, let that be `a`.
    let [f, g] = factors;
    let (a, f, b, g) = if out.cast_const() == b { (b, g, a, f) } else { (a, f, b, g) };
    let (f, g) = (S::times(f), S::times(g));
    // SAFETY: the caller's promise, passed on.
    unsafe { combine(a, b, out, n, |a, b| Sum::apply(f.map(a), g.map(b))) }
}

/// The `n % ELEMENTS` elements at `at`, in a unit filled up with zeros.
///
/// # Safety
/// `at` is readable for that many elements.
#[inline(always)]
unsafe fn read_part<U: Unit>(at: *const u8, n: usize) -> U {
    let mut unit = MaybeUninit::<U>::zeroed();
    // SAFETY: less than a unit is copied, and any bits are a valid unit.
    unsafe {
        at.copy_to_nonoverlapping(unit.as_mut_ptr().cast(), part_bytes::<U>(n));
        unit.assume_init()
    }
}

/// The first `n % ELEMENTS` elements of `unit` to `at`.
///
/// # Safety
/// `at` is writable for that many elements.
#[inline(always)]
unsafe fn write_part<U: Unit>(at: *mut u8, n: usize, unit: U) {
    // SAFETY: less than a unit is copied, out of a local.
    unsafe { at.copy_from_nonoverlapping((&raw const unit).cast(), part_bytes::<U>(n)) }
}

#[inline(always)]
const fn part_bytes<U: Unit>(n: usize) -> usize {
    n % U::ELEMENTS * (size_of::<U>() / U::ELEMENTS)
}

/// [`DivideFn`] for one unit type.
#[inline(always)]
unsafe fn divide<D: Divide>(buf: *mut u8, n: usize, divisor: usize) {
    if divisor > 1 {
        // SAFETY: the caller's promise, passed on.
        unsafe { D::divide(buf, n, divisor) }
    }
}

/// One module per instruction set: the loops under its features.
macro_rules! level {
    ($name:ident $(, $features:literal)?) => {
        pub(super) mod $name {
            use super::{Divide, Element, Op, ReduceDualFn, ReduceFn, Scaled, Sum, Unit};

            /// The two reductions of (unit, operator).
            pub(in super::super) fn pair<U: Unit, O: Op<U>>() -> (ReduceFn, ReduceDualFn) {
                (reduce::<U, O>, reduce_dual::<U, O>)
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn reduce<U: Unit, O: Op<U>>(a: *const u8, b: *const u8, out: *mut u8, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce::<U, O>(a, b, out, n, reduce::<U, O>) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn reduce_dual<U: Unit, O: Op<U>>(
                a: *const u8,
                b: *const u8,
                out: *mut u8,
                copy: *mut u8,
                n: usize,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce_dual::<U, O>(a, b, out, copy, n, reduce::<U, O>) }
            }

            $(#[target_feature(enable = $features)])?
            pub(in super::super) unsafe fn exact<E: Element>(
                sources: &[*const u8],
                out: *mut u8,
                n: usize,
                divisor: f64,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::super::exact::sum::<E>(sources, out, n, divisor) }
            }

            $(#[target_feature(enable = $features)])?
            pub(in super::super) unsafe fn divide<D: Divide>(buf: *mut u8, n: usize, divisor: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::divide::<D>(buf, n, divisor) }
            }

            $(#[target_feature(enable = $features)])?
            pub(in super::super) unsafe fn scale<S: Scaled>(from: *const u8, to: *mut u8, n: usize, factor: f64) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::map::<S, _>(from, to, n, &S::times(factor)) }
            }

            $(#[target_feature(enable = $features)])?
            pub(in super::super) unsafe fn scaled_sum<S: Scaled>(
                a: *const u8,
                b: *const u8,
                out: *mut u8,
                n: usize,
                factors: [f64; 2],
            ) where
                Sum: Op<S>,
            {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::scaled_sum::<S>(a, b, out, n, factors) }
            }
        }
    };
}
level!(baseline);
#[cfg(target_arch = "x86_64")]
level!(avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

/// The two reductions of (unit, operator) for `level`, which the machine must have when they are called.
pub(super) fn reduce_at<U: Unit, O: Op<U>>(level: Level) -> (ReduceFn, ReduceDualFn) {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::pair::<U, O>(),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::pair::<U, O>(),
        _ => baseline::pair::<U, O>(),
    }
}

/// The exact sum of a type for `level`, which the machine must have when it is called.
pub(super) fn exact_at<E: Element>(level: Level) -> ExactFn {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::exact::<E>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::exact::<E>,
        _ => baseline::exact::<E>,
    }
}

/// The division of a unit type for `level`, which the machine must have when it is called.
pub(super) fn divide_at<D: Divide>(level: Level) -> DivideFn {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::divide::<D>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::divide::<D>,
        _ => baseline::divide::<D>,
    }
}

/// The multiplication of a unit type and the sum of products for `level`, which the machine must have when they are
/// called.
pub(super) fn scale_at<S: Scaled>(level: Level) -> (ScaleFn, ScaledSumFn)
where
    Sum: Op<S>,
{
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => (avx512::scale::<S>, avx512::scaled_sum::<S>),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => (avx2::scale::<S>, avx2::scaled_sum::<S>),
        _ => (baseline::scale::<S>, baseline::scaled_sum::<S>),
    }
}
