//! Element-wise reduction of two buffers, with the instruction set found at run time.
//!
//! | file | idea |
//! | --- | --- |
//! | `ops` | what sum, prod, min and max mean for one element |
//! | `bits`, `f16`, `bf16`, `f8` | the small floats over integer units |
//! | `average` | what `avg` adds to a sum |
//! | `scale` | inputs times a factor, and sums of them |
//! | [`exact`], `exact_16`, `exact_512` | sums of all operands, rounded once |
//! | `divide` | sums of integers divided, by reciprocal multiplication |
//! | `simd` | the loops, compiled once per instruction set |
//! | `f16c` | f16 through the processor's own conversions |
//! | [`stream`] | copies that bypass the cache |
//!
//! Semantics: integers wrap; sums and products of the 16- and 8-bit floats are computed in `f32` and rounded to nearest
//! even at every pairwise step; `min` and `max` return NaN if either value is NaN and order -0 before +0. Every
//! operator is commutative bit for bit, NaN payloads excepted, so ranks that combine in another order of operands
//! agree.

mod average;
mod bf16;
mod bits;
mod divide;
pub mod exact;
#[cfg(target_arch = "x86_64")]
mod exact_16;
#[cfg(target_arch = "x86_64")]
mod exact_512;
#[cfg(test)]
mod exact_tests;
mod f16;
#[cfg(target_arch = "x86_64")]
mod f16c;
mod f8;
mod ops;
mod scale;
mod simd;
pub mod stream;
#[cfg(test)]
mod tests;

use std::fmt;

use tinynccl_plan::dtype::{DType, ReduceOp};

pub use self::average::Average;
use self::bf16::{Bf16, Bf16Pair};
pub use self::divide::Division;
pub use self::exact::Exact;
use self::f8::{E4M3, E5M2};
use self::ops::{BitAnd, BitOr, BitXor, Divide, Max, Min, Op, Prod, Scaled, Sum, Unit};
pub(crate) use self::scale::Piece;
pub use self::scale::{Operand, Scale};

/// `out[i] = a[i] op b[i]` for `n` elements. `out` may be exactly `a` or exactly `b`; no other overlap.
///
/// # Safety
/// `a` and `b` are readable and `out` is writable for `n` elements, and all three are aligned to the element (not to
/// any vector). With `n` zero the pointers are not looked at.
pub type ReduceFn = unsafe fn(a: *const u8, b: *const u8, out: *mut u8, n: usize);

/// As [`ReduceFn`] with the result written to two places.
///
/// # Safety
/// As [`ReduceFn`]; `copy` obeys the same rules as `out`.
pub type ReduceDualFn = unsafe fn(a: *const u8, b: *const u8, out: *mut u8, copy: *mut u8, n: usize);

/// `to[i] = from[i] * factor` for `n` elements; `factor` is a value of the element's type. `to` may be exactly `from`;
/// no other overlap.
///
/// # Safety
/// `from` is readable and `to` is writable for `n` elements, and both are aligned to the element. With `n` zero the
/// pointers are not looked at.
pub type ScaleFn = unsafe fn(from: *const u8, to: *mut u8, n: usize, factor: f64);

/// `out[i] = a[i] * factors[0] + b[i] * factors[1]` for `n` elements, products and sum each rounded to the element's
/// type. `out` may be exactly `a` or exactly `b`; no other overlap.
///
/// # Safety
/// As [`ReduceFn`]; `out` is not both.
pub type ScaledSumFn = unsafe fn(a: *const u8, b: *const u8, out: *mut u8, n: usize, factors: [f64; 2]);

/// `buf[i] = buf[i] / divisor` for `n` elements, towards zero. Divisors 0 and 1 leave the buffer as it is.
///
/// # Safety
/// `buf` is readable and writable for `n` elements and aligned to the element.
pub type DivideFn = unsafe fn(buf: *mut u8, n: usize, divisor: usize);

/// The functions of one (dtype, op) on this machine.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    /// One result.
    pub reduce: ReduceFn,
    /// One result, stored in two places.
    pub reduce_dual: ReduceDualFn,
    /// Multiplication by a factor; floats only.
    pub scale: Option<ScaleFn>,
    /// Sum of two products; floats only, and not f16 where the processor converts it.
    pub scaled_sum: Option<ScaledSumFn>,
    /// Division by an integer; integers only.
    pub divide: Option<DivideFn>,
}

/// The functions by which a call combines the values of its ranks.
#[derive(Debug, Clone, Copy)]
pub struct Combination {
    /// Two values to one; of more than two ranks not for an exact sum.
    pub kernels: Kernels,
    /// The average's additions to that.
    pub average: Average,
    /// All values to one: an exact sum of more than two ranks.
    pub exact: Option<Exact>,
}

impl Combination {
    /// For `op` of `dtype` among `ranks`; `exact`: rounded once where [`exact::covers`] says so.
    pub fn new(dtype: DType, op: Option<ReduceOp>, ranks: usize, exact: bool) -> Combination {
        let known = op.unwrap_or(ReduceOp::Sum);
        let kernels = kernels(dtype, known);
        if !exact || ranks < 2 || !exact::covers(dtype, op) {
            return Combination { kernels, average: Average::new(dtype, op, ranks), exact: None };
        }
        let average = Average::default();
        match ranks {
            2 => Combination { kernels: exact::of_two(Level::detect(), dtype, known, kernels), average, exact: None },
            _ => Combination { kernels, average, exact: Exact::new(dtype, op, ranks) },
        }
    }
}

/// An instruction set that the kernels are compiled for, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Instructions of every processor of the target (SSE2, NEON).
    Baseline,
    /// AVX2, FMA and F16C: 32-byte vectors.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 64-byte vectors.
    Avx512,
}

impl Level {
    /// Every level, worst first.
    pub const ALL: [Level; 3] = [Level::Baseline, Level::Avx2, Level::Avx512];

    /// The best level of this machine.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                return Level::Avx512;
            }
            if avx2 {
                return Level::Avx2;
            }
        }
        Level::Baseline
    }

    /// Short lower-case name: `baseline`, `avx2`, `avx512`.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Baseline => "baseline",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The fastest kernels of this machine for `dtype` and `op`. Cheap: a few cached feature tests and a table look-up.
pub fn kernels(dtype: DType, op: ReduceOp) -> Kernels {
    table(Level::detect(), dtype, op)
}

/// As [`kernels`] for a chosen instruction set; `None` if this machine lacks it.
pub fn kernels_at(level: Level, dtype: DType, op: ReduceOp) -> Option<Kernels> {
    (level <= Level::detect()).then(|| table(level, dtype, op))
}

/// Sum and prod of two's complement integers do not depend on the sign, so both signs share the unsigned kernels.
fn table(level: Level, dtype: DType, op: ReduceOp) -> Kernels {
    if op.is_bitwise() {
        // Of values of one size it does not matter what the bits mean.
        return match dtype.size() {
            1 => bitwise::<u8>(level, op),
            2 => bitwise::<u16>(level, op),
            4 => bitwise::<u32>(level, op),
            _ => bitwise::<u64>(level, op),
        };
    }
    match dtype {
        DType::F32 => float::<f32, f32>(level, op),
        DType::F64 => float::<f64, f64>(level, op),
        #[cfg(target_arch = "x86_64")]
        DType::F16 if level >= Level::Avx2 => f16c::kernels(level, op),
        DType::F16 => f16::kernels(op),
        DType::Bf16 => float::<Bf16Pair, Bf16>(level, op),
        DType::I8 => integer::<u8, i8>(level, op),
        DType::U8 => integer::<u8, u8>(level, op),
        DType::I32 => integer::<u32, i32>(level, op),
        DType::U32 => integer::<u32, u32>(level, op),
        DType::I64 => integer::<u64, i64>(level, op),
        DType::U64 => integer::<u64, u64>(level, op),
        DType::I16 => integer::<u16, i16>(level, op),
        DType::U16 => integer::<u16, u16>(level, op),
        DType::F8E4M3 => float::<E4M3, E4M3>(level, op),
        DType::F8E5M2 => float::<E5M2, E5M2>(level, op),
    }
}

/// `A`: unit of sum, prod and the multiplication, `M`: unit of min and max.
fn float<A: Scaled, M: Unit>(level: Level, op: ReduceOp) -> Kernels
where
    Sum: Op<A>,
    Prod: Op<A>,
    Min: Op<M>,
    Max: Op<M>,
{
    let (reduce, reduce_dual) = ordered::<A, M>(level, op);
    let (scale, scaled_sum) = simd::scale_at::<A>(level);
    Kernels { reduce, reduce_dual, scale: Some(scale), scaled_sum: Some(scaled_sum), divide: None }
}

/// `A`: unit of sum and prod, `M`: unit of min, max and the division.
fn integer<A: Unit, M: Divide>(level: Level, op: ReduceOp) -> Kernels
where
    Sum: Op<A>,
    Prod: Op<A>,
    Min: Op<M>,
    Max: Op<M>,
{
    let (reduce, reduce_dual) = ordered::<A, M>(level, op);
    Kernels { reduce, reduce_dual, scale: None, scaled_sum: None, divide: Some(simd::divide_at::<M>(level)) }
}

/// The operators on numbers.
fn ordered<A: Unit, M: Unit>(level: Level, op: ReduceOp) -> (ReduceFn, ReduceDualFn)
where
    Sum: Op<A>,
    Prod: Op<A>,
    Min: Op<M>,
    Max: Op<M>,
{
    match op {
        ReduceOp::Prod => simd::reduce_at::<A, Prod>(level),
        ReduceOp::Min => simd::reduce_at::<M, Min>(level),
        ReduceOp::Max => simd::reduce_at::<M, Max>(level),
        // Bits have a separate table.
        _ => simd::reduce_at::<A, Sum>(level),
    }
}

/// The operators on bits, over unsigned integers of the element's size.
fn bitwise<U: Unit>(level: Level, op: ReduceOp) -> Kernels
where
    BitAnd: Op<U>,
    BitOr: Op<U>,
    BitXor: Op<U>,
{
    let (reduce, reduce_dual) = match op {
        ReduceOp::BitAnd => simd::reduce_at::<U, BitAnd>(level),
        ReduceOp::BitOr => simd::reduce_at::<U, BitOr>(level),
        _ => simd::reduce_at::<U, BitXor>(level),
    };
    Kernels { reduce, reduce_dual, scale: None, scaled_sum: None, divide: None }
}
