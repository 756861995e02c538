//! Minimum and maximum of 16-bit floats on their bits: no conversion, sixteen or thirty-two to a vector.

use super::ops::{Lane, Max, Min, Op};

/// The bits of a 16-bit float whose positive infinity is `INF`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Bits16<const INF: u16>(pub(super) u16);

// SAFETY: one 16-bit element.
unsafe impl<const INF: u16> Lane for Bits16<INF> {}

impl<const INF: u16> Bits16<INF> {
    #[inline(always)]
    fn is_nan(self) -> bool {
        self.0 & 0x7fff > INF
    }

    /// Signed integer in the order of the floats (-0 before +0): negative values have their magnitude flipped.
    #[inline(always)]
    fn key(self) -> i16 {
        let bits = self.0 as i16;
        bits ^ ((bits >> 15) & 0x7fff)
    }

    /// The inverse of `key`: the flip keeps the sign, so it undoes itself.
    #[inline(always)]
    fn from_key(key: i16) -> Self {
        Self(Self(key as u16).key() as u16)
    }

    /// `other`, unless one of the two operands is NaN: then that one.
    #[inline(always)]
    fn nan_or(a: Self, b: Self, other: Self) -> Self {
        let (a_is_nan, b_is_nan) = (a.is_nan(), b.is_nan());
        let other = if b_is_nan { b } else { other };
        if a_is_nan { a } else { other }
    }
}

impl<const INF: u16> Op<Bits16<INF>> for Min {
    #[inline(always)]
    fn apply(a: Bits16<INF>, b: Bits16<INF>) -> Bits16<INF> {
        Bits16::nan_or(a, b, Bits16::from_key(a.key().min(b.key())))
    }
}

impl<const INF: u16> Op<Bits16<INF>> for Max {
    #[inline(always)]
    fn apply(a: Bits16<INF>, b: Bits16<INF>) -> Bits16<INF> {
        Bits16::nan_or(a, b, Bits16::from_key(a.key().max(b.key())))
    }
}
