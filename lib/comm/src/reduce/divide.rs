//! Division of a sum of integers by one number, as `avg` needs it.

use super::DivideFn;
use super::ops::{Divide, Map};
use super::simd::map;

/// The division of a finished sum.
#[derive(Debug, Clone, Copy)]
pub struct Division {
    divide: DivideFn,
    divisor: usize,
}

impl Division {
    pub(super) fn new(divide: DivideFn, divisor: usize) -> Division {
        Division { divide, divisor }
    }

    /// `buf[i] = buf[i] / divisor` for `n` elements.
    ///
    /// # Safety
    /// As [`DivideFn`].
    #[inline]
    pub unsafe fn apply(&self, buf: *mut u8, n: usize) {
        // SAFETY: forwarded from the caller; the kernel is that of the type.
        unsafe { (self.divide)(buf, n, self.divisor) }
    }
}

/// Division by an invariant integer through a multiplication: Granlund and Montgomery, "Division by invariant integers
/// using multiplication", PLDI 1994, figure 4.1. Exact for every dividend and every divisor of 2 or more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reciprocal<U> {
    magic: U,
    shift: u32,
}

/// The quotient of everything when the divisor exceeds the type.
struct Zero;

/// `$s` and `$u`: the signed and the unsigned type of one width; `$w`: the unsigned type of twice that width.
macro_rules! integer {
    ($($s:ty, $u:ty, $w:ty);* $(;)?) => {$(
        impl Reciprocal<$u> {
            /// `None` if `divisor` does not fit the type. `divisor` is at least 2.
            #[inline(always)]
            pub(super) fn new(divisor: usize) -> Option<Self> {
                let d = <$u>::try_from(divisor).ok()?;
                // Ceiling of the logarithm, 1 to the width.
                let log2 = <$u>::BITS - (d - 1).leading_zeros();
                let excess = ((1 as $w) << (log2 - 1) << 1).wrapping_sub(<$w>::from(d));
                let magic = (excess << <$u>::BITS) / <$w>::from(d) + 1;
                Some(Self { magic: magic as $u, shift: log2 - 1 })
            }

            #[inline(always)]
            fn quotient(self, x: $u) -> $u {
                let high = ((<$w>::from(self.magic) * <$w>::from(x)) >> <$u>::BITS) as $u;
                // At most `x`, so neither the difference nor the sum wraps.
                high.wrapping_add(x.wrapping_sub(high) >> 1) >> self.shift
            }
        }
        impl Map<$u> for Reciprocal<$u> {
            #[inline(always)]
            fn map(&self, x: $u) -> $u {
                self.quotient(x)
            }
        }
        impl Map<$s> for Reciprocal<$u> {
            #[inline(always)]
            fn map(&self, x: $s) -> $s {
                let magnitude = self.quotient(x.unsigned_abs()) as $s;
                if x < 0 { magnitude.wrapping_neg() } else { magnitude }
            }
        }
        integer!(@divide $u, $u);
        integer!(@divide $s, $u);
    )*};
    (@divide $t:ty, $u:ty) => {
        impl Map<$t> for Zero {
            #[inline(always)]
            fn map(&self, _: $t) -> $t {
                0
            }
        }
        impl Divide for $t {
            #[inline(always)]
            unsafe fn divide(buf: *mut u8, n: usize, divisor: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe {
                    match Reciprocal::<$u>::new(divisor) {
                        Some(reciprocal) => map::<$t, _>(buf, buf, n, &reciprocal),
                        None => map::<$t, _>(buf, buf, n, &Zero),
                    }
                }
            }
        }
    };
}
integer! {
    i8, u8, u16;
    i16, u16, u32;
    i32, u32, u64;
    i64, u64, u128;
}
