//! Multiplication of inputs by one factor before they are summed: `avg` of floats multiplies by 1/n.

use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::ops::{Map, Scaled};
use super::{Level, ReduceFn, ScaleFn, ScaledSumFn, table};
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::float8::{F8E4M3, F8E5M2};

/// A factor for the elements of a type. Products are rounded to that type, so they are inputs like any others.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    multiply: ScaleFn,
    scaled_sum: Option<ScaledSumFn>,
    sum: ReduceFn,
    factor: f64,
}

/// One side of a sum.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// Its elements.
    pub at: *const u8,
    /// A rank's input, which is to be multiplied by the factor.
    pub input: bool,
}

impl Operand {
    /// A rank's input.
    pub fn input(at: *const u8) -> Operand {
        Operand { at, input: true }
    }

    /// A product, or a sum of products.
    pub fn product(at: *const u8) -> Operand {
        Operand { at, input: false }
    }

    /// Returns the operand that begins `bytes` bytes later.
    #[must_use]
    pub fn skip(self, bytes: usize) -> Operand {
        Operand { at: self.at.wrapping_add(bytes), ..self }
    }
}

/// Bytes of a piece that stays in the L1 cache.
const PIECE: usize = 4 << 10;

/// Memory for an intermediate result that stays in the L1 cache.
#[repr(align(64))]
pub(crate) struct Piece(MaybeUninit<[u8; PIECE]>);

impl Piece {
    pub(crate) fn new() -> Piece {
        Piece(MaybeUninit::uninit())
    }

    pub(crate) fn memory(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// Calls `work` for parts of `n` elements of `size` bytes that fit: with the elements, and the bytes before them.
    pub(crate) fn cut(n: usize, size: usize, mut work: impl FnMut(usize, usize)) {
        let step = PIECE / size;
        (0..n).step_by(step).for_each(|start| work(step.min(n - start), start * size));
    }
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
        let kernels = table(level, dtype, ReduceOp::Sum);
        let (scaled_sum, sum) = (kernels.scaled_sum, kernels.reduce);
        kernels.scale.map(|multiply| Scale { multiply, scaled_sum, sum, factor })
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

    /// `out = a + b` for `n` elements of `size` bytes, of which inputs are multiplied first.
    ///
    /// # Safety
    /// As [`ScaledSumFn`].
    pub unsafe fn sum(&self, a: Operand, b: Operand, out: *mut u8, n: usize, size: usize) {
        // A product with 1 is the element itself.
        let factor = |operand: Operand| if operand.input { self.factor } else { 1.0 };
        if let Some(scaled_sum) = self.scaled_sum {
            // SAFETY: forwarded from the caller; the kernel is that of the type.
            return unsafe { scaled_sum(a.at, b.at, out, n, [factor(a), factor(b)]) };
        }
        let (mut first, mut second) = (Piece::new(), Piece::new());
        Piece::cut(n, size, |n, skip| {
            let ready = |operand: Operand, piece: &mut Piece| {
                let at = operand.skip(skip).at;
                if !operand.input {
                    return at;
                }
                let piece = piece.memory();
                // SAFETY: by the caller; the piece holds `n` elements.
                unsafe { self.apply(at, piece, n) };
                piece.cast_const()
            };
            let (a, b) = (ready(a, &mut first), ready(b, &mut second));
            // SAFETY: by the caller; pieces are read before `out` is written.
            unsafe { (self.sum)(a, b, out.wrapping_add(skip), n) };
        });
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
            type Times = Times<$t>;

            #[inline(always)]
            fn times(factor: f64) -> Times<$t> {
                Times(factor as $t)
            }
        }
    )*};
}
float!(f32, f64);
