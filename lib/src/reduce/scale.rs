//! Multiplication of inputs by one factor before they are summed: `avg` of floats multiplies by 1/n.

use half::{bf16, f16};

use super::ops::{Map, Scaled};
use super::simd::map;
use super::{Level, ScaleFn, table};
use crate::dtype::{DType, ReduceOp};
use crate::float8::{F8E4M3, F8E5M2};

/// A factor for the elements of a type. Products are rounded to that type, so they are inputs like any others.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    multiply: ScaleFn,
    factor: f64,
}

impl Scale {
    /// The factor rounded to `dtype`, by way of `f32` where that is wider, as NCCL rounds it; `None` for integers.
    pub fn new(dtype: DType, factor: f64) -> Option<Scale> {
        Scale::at(Level::detect(), dtype, factor)
    }

    /// As [`Scale::new`] for an instruction set that this machine has.
    pub(super) fn at(level: Level, dtype: DType, factor: f64) -> Option<Scale> {
        let narrow = factor as f32;
        let factor = match dtype {
            DType::F64 => factor,
            DType::F32 => narrow.into(),
            DType::F16 => f16::from_f32(narrow).into(),
            DType::Bf16 => bf16::from_f32(narrow).into(),
            DType::F8E4M3 => F8E4M3::from_f32(narrow).to_f32().into(),
            DType::F8E5M2 => F8E5M2::from_f32(narrow).to_f32().into(),
            _ => return None,
        };
        table(level, dtype, ReduceOp::Sum).scale.map(|multiply| Scale { multiply, factor })
    }

    /// The factor, a value of the type.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// `to[i] = from[i] * factor` for `n` elements.
    ///
    /// # Safety
    /// As [`ScaleFn`].
    #[inline]
    pub unsafe fn apply(&self, from: *const u8, to: *mut u8, n: usize) {
        // SAFETY: forwarded from the caller; the kernel is that of the type.
        unsafe { (self.multiply)(from, to, n, self.factor) }
    }
}

/// Multiplication by a constant.
pub(super) struct Times<T>(pub(super) T);

macro_rules! float {
    ($($t:ty),*) => {$(
        impl Map<$t> for Times<$t> {
            #[inline(always)]
            fn map(&self, x: $t) -> $t {
                x * self.0
            }
        }
        impl Scaled for $t {
            #[inline(always)]
            unsafe fn scale(from: *const u8, to: *mut u8, n: usize, factor: f64) {
                // SAFETY: the caller's promise, passed on.
                unsafe { map::<$t, _>(from, to, n, &Times(factor as $t)) }
            }
        }
    )*};
}
float!(f32, f64);
