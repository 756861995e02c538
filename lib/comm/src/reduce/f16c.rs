//! f16 sums and products with the processor's conversions: F16C, and its 512-bit form.
//!
//! The conversion to f16 rounds to nearest even whatever the thread's rounding mode is. Blocks are loaded before they
//! are stored, so one loop serves results in the place of operands too.

use std::arch::x86_64::*;

use super::exact::SumOfTwo;
use super::f16::F16;
use super::ops::{Max, Min, Prod, Sum};
use super::{Kernels, Level, ReduceDualFn, ReduceFn, simd};
use tinynccl_plan::dtype::ReduceOp;

/// Two registers of `f32`, which as f16 fill one. The functions need the features of the level that they are compiled
/// for; `load` and `store` also need the memory of `ELEMENTS` elements.
trait Registers: Copy {
    const ELEMENTS: usize;
    /// The register of f16.
    type Narrow: Copy;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn narrow(self) -> Self::Narrow;
    unsafe fn store(narrow: Self::Narrow, to: *mut u8);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Each NaN replaced by one of them.
    unsafe fn one_nan(self) -> Self;
}

/// `$half`, `$narrow`: registers of half as many and of all the f16; `$t`: register of as many `f32` as `$half` has
/// f16.
macro_rules! registers {
    ($name:ident { $half:ty, $narrow:ty, $t:ty, elements $elements:literal, load $load:ident, widen $widen:ident,
     round $round:ident::<$rounding:ident>, join $join:ident($low:ident), store $store:ident,
     arithmetic $splat:ident $add:ident $mul:ident $one_nan:ident }) => {
        #[derive(Clone, Copy)]
        struct $name($t, $t);

        impl Registers for $name {
            const ELEMENTS: usize = $elements;
            type Narrow = $narrow;
            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                let from = from.cast::<$half>();
                // SAFETY: the caller has the features and the memory.
                unsafe { Self($widen($load(from)), $widen($load(from.add(1)))) }
            }
            #[inline(always)]
            unsafe fn narrow(self) -> $narrow {
                // SAFETY: the caller has the features.
                unsafe { $join::<1>($low($round::<$rounding>(self.0)), $round::<$rounding>(self.1)) }
            }
            #[inline(always)]
            unsafe fn store(narrow: $narrow, to: *mut u8) {
                // SAFETY: the caller has the features and the memory.
                unsafe { $store(to.cast(), narrow) }
            }
            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the caller has the features.
                unsafe { Self($splat(x), $splat(x)) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller has the features.
                unsafe { Self($add(self.0, other.0), $add(self.1, other.1)) }
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                // SAFETY: the caller has the features.
                unsafe { Self($mul(self.0, other.0), $mul(self.1, other.1)) }
            }
            #[inline(always)]
            unsafe fn one_nan(self) -> Self {
                // SAFETY: the caller has the features.
                unsafe { Self($one_nan(self.0), $one_nan(self.1)) }
            }
        }
    };
}

/// The 512-bit conversion requires the flag that exceptions stay masked.
const NEAREST_512: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn one_nan_256(x: __m256) -> __m256 {
    _mm256_blendv_ps(x, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn one_nan_512(x: __m512) -> __m512 {
    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), x, _mm512_set1_ps(f32::NAN))
}

registers!(F16x16 {
    __m128i, __m256i, __m256, elements 16, load _mm_loadu_si128, widen _mm256_cvtph_ps,
    round _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>, join _mm256_inserti128_si256(_mm256_castsi128_si256),
    store _mm256_storeu_si256, arithmetic _mm256_set1_ps _mm256_add_ps _mm256_mul_ps one_nan_256
});
registers!(F16x32 {
    __m256i, __m512i, __m512, elements 32, load _mm256_loadu_si256, widen _mm512_cvtph_ps,
    round _mm512_cvtps_ph::<NEAREST_512>, join _mm512_inserti64x4(_mm512_castsi256_si512),
    store _mm512_storeu_si512, arithmetic _mm512_set1_ps _mm512_add_ps _mm512_mul_ps one_nan_512
});

/// An operator on registers.
trait RegisterOp {
    /// # Safety
    /// As [`Registers`].
    unsafe fn apply<R: Registers>(a: R, b: R) -> R;
}

impl RegisterOp for Sum {
    #[inline(always)]
    unsafe fn apply<R: Registers>(a: R, b: R) -> R {
        // SAFETY: the caller has the features.
        unsafe { a.add(b) }
    }
}

impl RegisterOp for SumOfTwo {
    #[inline(always)]
    unsafe fn apply<R: Registers>(a: R, b: R) -> R {
        // SAFETY: the caller has the features.
        unsafe { a.add(b).one_nan() }
    }
}

impl RegisterOp for Prod {
    #[inline(always)]
    unsafe fn apply<R: Registers>(a: R, b: R) -> R {
        // SAFETY: the caller has the features.
        unsafe { a.mul(b) }
    }
}

/// Bytes of an element.
const SIZE: usize = 2;

/// A local of the size of the widest `Narrow`.
type Stage = [u8; 32 * SIZE];

/// The `n` elements at `from`, filled up with zeros; `n` below `ELEMENTS`.
#[inline(always)]
unsafe fn load_part<R: Registers>(from: *const u8, n: usize) -> R {
    let mut stage: Stage = [0; size_of::<Stage>()];
    // SAFETY: the caller's memory, into a local that is large enough.
    unsafe {
        from.copy_to_nonoverlapping(stage.as_mut_ptr(), n * SIZE);
        R::load(stage.as_ptr())
    }
}

/// The first `n` elements to `to`; `n` below `ELEMENTS`.
#[inline(always)]
unsafe fn store_part<R: Registers>(narrow: R::Narrow, to: *mut u8, n: usize) {
    let mut stage: Stage = [0; size_of::<Stage>()];
    // SAFETY: a local that is large enough, into the caller's memory.
    unsafe {
        R::store(narrow, stage.as_mut_ptr());
        to.copy_from_nonoverlapping(stage.as_ptr(), n * SIZE);
    }
}

/// Writes `a op b` to `out` and, if `DUAL`, to `copy`.
#[inline(always)]
unsafe fn reduce<R: Registers, O: RegisterOp, const DUAL: bool>(
    a: *const u8,
    b: *const u8,
    out: *mut u8,
    copy: *mut u8,
    n: usize,
) {
    let whole = n - n % R::ELEMENTS;
    // SAFETY: all offsets are below `n` elements.
    unsafe {
        for i in (0..whole).step_by(R::ELEMENTS) {
            let at = i * SIZE;
            let value = O::apply(R::load(a.add(at)), R::load(b.add(at))).narrow();
            R::store(value, out.add(at));
            if DUAL {
                R::store(value, copy.add(at));
            }
        }
        let rest = n - whole;
        if rest > 0 {
            let at = whole * SIZE;
            let value = O::apply(load_part::<R>(a.add(at), rest), load_part(b.add(at), rest)).narrow();
            store_part::<R>(value, out.add(at), rest);
            if DUAL {
                store_part::<R>(value, copy.add(at), rest);
            }
        }
    }
}

/// [`super::ScaleFn`].
#[inline(always)]
unsafe fn scale<R: Registers>(from: *const u8, to: *mut u8, n: usize, factor: f64) {
    let whole = n - n % R::ELEMENTS;
    // SAFETY: all offsets are below `n` elements.
    unsafe {
        let factor = R::splat(factor as f32);
        for i in (0..whole).step_by(R::ELEMENTS) {
            let at = i * SIZE;
            R::store(R::load(from.add(at)).mul(factor).narrow(), to.add(at));
        }
        let rest = n - whole;
        if rest > 0 {
            let at = whole * SIZE;
            store_part::<R>(load_part::<R>(from.add(at), rest).mul(factor).narrow(), to.add(at), rest);
        }
    }
}

macro_rules! level {
    ($name:ident, $registers:ident, $features:literal) => {
        mod $name {
            use super::RegisterOp;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn reduce<O: RegisterOp>(a: *const u8, b: *const u8, out: *mut u8, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::reduce::<super::$registers, O, false>(a, b, out, out, n) }
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
                unsafe { super::reduce::<super::$registers, O, true>(a, b, out, copy, n) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn scale(from: *const u8, to: *mut u8, n: usize, factor: f64) {
                // SAFETY: the caller's promise, passed on.
                unsafe { super::scale::<super::$registers>(from, to, n, factor) }
            }
        }
    };
}
level!(avx2, F16x16, "avx2,fma,f16c");
level!(avx512, F16x32, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");

/// The kernels for `level`, which is AVX2 or better. Min and max need no conversion.
pub(super) fn kernels(level: Level, op: ReduceOp) -> Kernels {
    let (reduce, reduce_dual) = match op {
        ReduceOp::Prod => reduce_at::<Prod>(level),
        ReduceOp::Min => simd::reduce_at::<F16, Min>(level),
        ReduceOp::Max => simd::reduce_at::<F16, Max>(level),
        // Bits have separate kernels.
        _ => reduce_at::<Sum>(level),
    };
    let scale = if level == Level::Avx512 { avx512::scale } else { avx2::scale };
    Kernels { reduce, reduce_dual, scale: Some(scale), scaled_sum: None, divide: None }
}

/// The sum of two operands with one NaN, for `level`, which is AVX2 or better.
pub(super) fn exact_sum(level: Level) -> (ReduceFn, ReduceDualFn) {
    reduce_at::<SumOfTwo>(level)
}

fn reduce_at<O: RegisterOp>(level: Level) -> (ReduceFn, ReduceDualFn) {
    if level == Level::Avx512 {
        (avx512::reduce::<O>, avx512::reduce_dual::<O>)
    } else {
        (avx2::reduce::<O>, avx2::reduce_dual::<O>)
    }
}
