//! Operators on one unit. Everything here is branch-free, so that the loops in `simd` vectorise.

/// The unit that a loop works on: usually one element; a unit may pack several.
///
/// # Safety
/// The type is plain data: no padding, every bit pattern valid, its size `ELEMENTS` times that of the element and its
/// alignment not above the element's.
pub(super) unsafe trait Unit: Copy + 'static {
    /// Elements in one unit.
    const ELEMENTS: usize = 1;
}

/// A commutative operator on units.
pub(super) trait Op<U> {
    /// `a op b`.
    fn apply(a: U, b: U) -> U;
}

/// Addition; integers wrap.
pub(super) struct Sum;
/// Multiplication; integers wrap.
pub(super) struct Prod;
/// Minimum; NaN if either is NaN; -0 < +0.
pub(super) struct Min;
/// Maximum; NaN if either is NaN; -0 < +0.
pub(super) struct Max;
/// Bitwise and.
pub(super) struct BitAnd;
/// Bitwise or.
pub(super) struct BitOr;
/// Bitwise exclusive or.
pub(super) struct BitXor;

/// Sum and prod of integers, and their bits. Instantiated for the unsigned types, which stand for the signed ones too.
macro_rules! wrapping {
    ($($t:ty),*) => {$(
        impl Op<$t> for Sum {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
        }
        impl Op<$t> for Prod {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a.wrapping_mul(b)
            }
        }
        impl Op<$t> for BitAnd {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a & b
            }
        }
        impl Op<$t> for BitOr {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a | b
            }
        }
        impl Op<$t> for BitXor {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a ^ b
            }
        }
    )*};
}
wrapping!(u8, u16, u32, u64);

macro_rules! ordered {
    ($($t:ty),*) => {$(
        // SAFETY: a primitive integer is one element.
        unsafe impl Unit for $t {}
        impl Op<$t> for Min {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                if a < b { a } else { b }
            }
        }
        impl Op<$t> for Max {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                if a > b { a } else { b }
            }
        }
    )*};
}
ordered!(i8, u8, i16, u16, i32, u32, i64, u64);

/// `if a < b { a } else { b }` is the processor's own minimum: it answers `b` when the two are equal or unordered.
/// Taken both ways round, the two answers differ only for zeros of different sign, where the or (and) of the bits is
/// the negative (positive) one, and for NaN, which the sum then replaces.
macro_rules! float {
    ($($t:ty),*) => {$(
        // SAFETY: a primitive float is one element.
        unsafe impl Unit for $t {}
        impl Op<$t> for Sum {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a + b
            }
        }
        impl Op<$t> for Prod {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                a * b
            }
        }
        impl Op<$t> for Min {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                let (x, y) = (if a < b { a } else { b }, if b < a { b } else { a });
                let least = <$t>::from_bits(x.to_bits() | y.to_bits());
                if a.is_nan() | b.is_nan() { a + b } else { least }
            }
        }
        impl Op<$t> for Max {
            #[inline(always)]
            fn apply(a: $t, b: $t) -> $t {
                let (x, y) = (if a > b { a } else { b }, if b > a { b } else { a });
                let greatest = <$t>::from_bits(x.to_bits() & y.to_bits());
                if a.is_nan() | b.is_nan() { a + b } else { greatest }
            }
        }
    )*};
}
float!(f32, f64);

/// A function of one unit.
pub(super) trait Map<U> {
    /// Its value at `x`.
    fn map(&self, x: U) -> U;
}

/// Floats, which can be multiplied by a factor.
pub(super) trait Scaled: Unit {
    /// The multiplication.
    type Times: Map<Self>;

    /// That by `factor`.
    fn times(factor: f64) -> Self::Times;
}

/// Integers, which can be divided by one.
pub(super) trait Divide: Unit {
    /// `buf[i] /= divisor` for `n` elements, `divisor` at least 2. Inlined into one function per instruction set.
    ///
    /// # Safety
    /// As [`super::DivideFn`].
    unsafe fn divide(buf: *mut u8, n: usize, divisor: usize);
}
