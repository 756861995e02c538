//! IEEE binary16 sums and products in portable, branch-free integer and `f32` arithmetic.
//!
//! Conversions after Fabian Giesen, "half to float done quick" and its companion with rounding to nearest even.
//! Machines with F16C take the path in `f16c` instead.

use super::bits::Bits16;
use super::exact::SumOfTwo;
use super::ops::{Map, Max, Min, Op, Prod, Scaled, Sum};
use super::scale::Times;
use super::simd::baseline;
use super::{Kernels, ScaleFn, ScaledSumFn};
use tinynccl_plan::dtype::ReduceOp;

/// One f16.
pub(super) type F16 = Bits16<0x7c00>;

/// Exact value of an f16.
#[inline(always)]
pub(super) fn widen(half: F16) -> f32 {
    /// 2^112: the difference of the two exponent biases, as a factor. Multiplying makes subnormals right too.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(half.0 & 0x7fff);
    let sign = u32::from(half.0 & 0x8000) << 16;
    let finite = (f32::from_bits(magnitude << 13) * REBIAS).to_bits();
    let exponent = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite | exponent | sign)
}

/// Nearest f16, ties to even; overflow goes to infinity; NaN stays a (quiet) NaN.
#[inline(always)]
pub(super) fn narrow(value: f32) -> F16 {
    /// 0.5, whose last place is the smallest f16 subnormal: adding it rounds to that place.
    const HALF: u32 = 126 << 23;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(HALF)).to_bits().wrapping_sub(HALF);
    // Change of the bias (127 to 15) and half a last place less one; the odd bit adds the rest on ties.
    let normal = magnitude.wrapping_sub((112 << 23) - 0xfff).wrapping_add((magnitude >> 13) & 1) >> 13;
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let small = if magnitude < 113 << 23 { subnormal } else { normal };
    let large = if magnitude > 0x7f80_0000 { nan } else { 0x7c00 };
    let rounded = if magnitude >= 143 << 23 { large } else { small };
    Bits16((rounded | ((bits >> 16) & 0x8000)) as u16)
}

macro_rules! through_f32 {
    ($($op:ty),*) => {$(
        impl Op<F16> for $op {
            #[inline(always)]
            fn apply(a: F16, b: F16) -> F16 {
                narrow(Self::apply(widen(a), widen(b)))
            }
        }
    )*};
}
through_f32!(Sum, SumOfTwo, Prod);

impl Map<F16> for Times<f32> {
    #[inline(always)]
    fn map(&self, x: F16) -> F16 {
        narrow(widen(x) * self.0)
    }
}

impl Scaled for F16 {
    type Times = Times<f32>;

    #[inline(always)]
    fn times(factor: f64) -> Times<f32> {
        Times(factor as f32)
    }
}

/// The kernels of machines without F16C.
pub(super) fn kernels(op: ReduceOp) -> Kernels {
    let (reduce, reduce_dual) = match op {
        ReduceOp::Prod => baseline::pair::<F16, Prod>(),
        ReduceOp::Min => baseline::pair::<F16, Min>(),
        ReduceOp::Max => baseline::pair::<F16, Max>(),
        // Bits have separate kernels.
        _ => baseline::pair::<F16, Sum>(),
    };
    let (scale, scaled_sum) =
        (Some(baseline::scale::<F16> as ScaleFn), Some(baseline::scaled_sum::<F16> as ScaledSumFn));
    Kernels { reduce, reduce_dual, scale, scaled_sum, divide: None }
}
