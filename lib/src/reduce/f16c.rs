//! f16 sums, products and divisions with the processor's conversions: F16C, and its 512-bit form.
//!
//! The conversion to f16 rounds to nearest even whatever the thread's rounding mode is. Blocks are loaded before they
//! are stored, so one loop serves results in the place of operands too.

use std::arch::x86_64::*;

use super::f16::F16;
use super::ops::{Max, Min, Prod, Sum};
use super::{Kernels, Level, ReduceDualFn, ReduceFn, simd};
use crate::dtype::ReduceOp;

/// A register of `f32` that is loaded from and stored to f16. The functions need the features of the level that they
/// are compiled for; `load` and `store` also need the memory of `LANES` elements.
trait Register: Copy {
    const LANES: usize;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
}

macro_rules! register {
    ($t:ty, $lanes:literal, $loadu:ident, $widen:ident, $storeu:ident, $narrow:ident::<$rounding:ident>,
     $splat:ident, $add:ident, $mul:ident, $div:ident) => {
        impl Register for $t {
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                // SAFETY: the caller has the features and the memory.
                unsafe { $widen($loadu(from.cast())) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the caller has the features and the memory.
                unsafe { $storeu(to.cast(), $narrow::<$rounding>(self)) }
            }
            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the caller has the features.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller has the features.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                // SAFETY: the caller has the features.
                unsafe { $mul(self, other) }
            }
            #[inline(always)]
            unsafe fn div(self, other: Self) -> Self {
                // SAFETY: the caller has the features.
                unsafe { $div(self, other) }
            }
        }
    };
}

/// The 512-bit conversion wants to hear that exceptions stay masked.
const NEAREST_512: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

register!(
    __m256,
    8,
    _mm_loadu_si128,
    _mm256_cvtph_ps,
    _mm_storeu_si128,
    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>,
    _mm256_set1_ps,
    _mm256_add_ps,
    _mm256_mul_ps,
    _mm256_div_ps
);
register!(
    __m512,
    16,
    _mm256_loadu_si256,
    _mm512_cvtph_ps,
    _mm256_storeu_si256,
    _mm512_cvtps_ph::<NEAREST_512>,
    _mm512_set1_ps,
    _mm512_add_ps,
    _mm512_mul_ps,
    _mm512_div_ps
);

/// An operator on registers.
trait RegisterOp {
    /// # Safety
    /// As [`Register`].
    unsafe fn apply<R: Register>(a: R, b: R) -> R;
}

impl RegisterOp for Sum {
    #[inline(always)]
    unsafe fn apply<R: Register>(a: R, b: R) -> R {
        // SAFETY: the caller has the features.
        unsafe { a.add(b) }
    }
}

impl RegisterOp for Prod {
    #[inline(always)]
    unsafe fn apply<R: Register>(a: R, b: R) -> R {
        // SAFETY: the caller has the features.
        unsafe { a.mul(b) }
    }
}

/// Division: the first operand by the second.
struct Quotient;

impl RegisterOp for Quotient {
    #[inline(always)]
    unsafe fn apply<R: Register>(a: R, b: R) -> R {
        // SAFETY: the caller has the features.
        unsafe { a.div(b) }
    }
}

/// Bytes of an element.
const SIZE: usize = 2;

/// A register of the `n` elements at `from`, filled up with zeros; `n` below `LANES`.
#[inline(always)]
unsafe fn load_part<R: Register>(from: *const u8, n: usize) -> R {
    let mut stage = [0u8; 16 * SIZE];
    // SAFETY: the caller's memory, into a local that holds any register.
    unsafe {
        from.copy_to_nonoverlapping(stage.as_mut_ptr(), n * SIZE);
        R::load(stage.as_ptr())
    }
}

/// The first `n` elements of a register to `to`; `n` below `LANES`.
#[inline(always)]
unsafe fn store_part<R: Register>(value: R, to: *mut u8, n: usize) {
    let mut stage = [0u8; 16 * SIZE];
    // SAFETY: a local that holds any register, into the caller's memory.
    unsafe {
        value.store(stage.as_mut_ptr());
        to.copy_from_nonoverlapping(stage.as_ptr(), n * SIZE);
    }
}

/// Writes `a op b` to `out` and, if `DUAL`, to `copy`.
#[inline(always)]
unsafe fn reduce<R: Register, O: RegisterOp, const DUAL: bool>(
    a: *const u8,
    b: *const u8,
    out: *mut u8,
    copy: *mut u8,
    n: usize,
) {
    let whole = n - n % R::LANES;
    // SAFETY: all offsets are below `n` elements.
    unsafe {
        for i in (0..whole).step_by(R::LANES) {
            let value = O::apply(R::load(a.add(i * SIZE)), R::load(b.add(i * SIZE)));
            value.store(out.add(i * SIZE));
            if DUAL {
                value.store(copy.add(i * SIZE));
            }
        }
        let rest = n - whole;
        if rest > 0 {
            let at = whole * SIZE;
            let value = O::apply(load_part::<R>(a.add(at), rest), load_part(b.add(at), rest));
            store_part(value, out.add(at), rest);
            if DUAL {
                store_part(value, copy.add(at), rest);
            }
        }
    }
}

/// [`super::DivideFn`].
#[inline(always)]
unsafe fn divide<R: Register>(buf: *mut u8, n: usize, divisor: usize) {
    if divisor <= 1 {
        return;
    }
    // SAFETY: the caller's promise, passed on. The inverse of a power of two is exact, and multiplying by it rounds the
    // same number as dividing.
    unsafe {
        if divisor.is_power_of_two() {
            combine_with::<R, Prod>(buf, n, R::splat(1.0 / divisor as f32));
        } else {
            combine_with::<R, Quotient>(buf, n, R::splat(divisor as f32));
        }
    }
}

/// `buf[i] = buf[i] op operand` for `n` elements.
#[inline(always)]
unsafe fn combine_with<R: Register, O: RegisterOp>(buf: *mut u8, n: usize, operand: R) {
    let whole = n - n % R::LANES;
    // SAFETY: all offsets are below `n` elements.
    unsafe {
        for i in (0..whole).step_by(R::LANES) {
            let at = buf.add(i * SIZE);
            O::apply(R::load(at), operand).store(at);
        }
        let rest = n - whole;
        if rest > 0 {
            let at = buf.add(whole * SIZE);
            store_part(O::apply(load_part(at, rest), operand), at, rest);
        }
    }
}

macro_rules! level {
    ($name:ident, $register:ty, $features:literal) => {
        mod $name {
            use std::arch::x86_64::*;

            use super::RegisterOp;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn reduce<O: RegisterOp>(a: *const u8, b: *const u8, out: *mut u8, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce::<$register, O, false>(a, b, out, out, n) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn reduce_dual<O: RegisterOp>(
                a: *const u8,
                b: *const u8,
                out: *mut u8,
                copy: *mut u8,
                n: usize,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce::<$register, O, true>(a, b, out, copy, n) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn divide(buf: *mut u8, n: usize, divisor: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::divide::<$register>(buf, n, divisor) }
            }
        }
    };
}
level!(avx2, __m256, "avx2,fma,f16c");
level!(avx512, __m512, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

/// The kernels for `level`, which is AVX2 or better. Min and max need no conversion.
pub(super) fn kernels(level: Level, op: ReduceOp) -> Kernels {
    let (reduce, reduce_dual) = match op {
        ReduceOp::Sum | ReduceOp::Avg => reduce_at::<Sum>(level),
        ReduceOp::Prod => reduce_at::<Prod>(level),
        ReduceOp::Min => simd::reduce_at::<F16, Min>(level),
        ReduceOp::Max => simd::reduce_at::<F16, Max>(level),
    };
    let divide = if level == Level::Avx512 { avx512::divide } else { avx2::divide };
    Kernels { reduce, reduce_dual, divide }
}

fn reduce_at<O: RegisterOp>(level: Level) -> (ReduceFn, ReduceDualFn) {
    if level == Level::Avx512 {
        (avx512::reduce::<O>, avx512::reduce_dual::<O>)
    } else {
        (avx2::reduce::<O>, avx2::reduce_dual::<O>)
    }
}
