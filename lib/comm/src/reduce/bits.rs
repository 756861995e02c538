//! Minimum and maximum of 8- and 16-bit floats on their bits: no conversion, as many to a vector as there is room for.

use super::ops::{Max, Min, Op, Unit};

macro_rules! bits {
    ($name:ident, $u:ident, $i:ident, $size:literal) => {
        #[doc = concat!("The bits of a ", $size, "-bit float whose greatest magnitude that is no NaN is `MOST`.")]
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $name<const MOST: $u>(pub(super) $u);

        // SAFETY: one element.
        unsafe impl<const MOST: $u> Unit for $name<MOST> {}

        impl<const MOST: $u> $name<MOST> {
            #[inline(always)]
            fn is_nan(self) -> bool {
                self.0 & ($u::MAX >> 1) > MOST
            }

            /// Signed integer in the order of the floats (-0 before +0): negative values have their magnitude flipped.
            #[inline(always)]
            fn key(self) -> $i {
                let bits = self.0 as $i;
                bits ^ ((bits >> ($u::BITS - 1)) & $i::MAX)
            }

            /// The inverse of `key`: the flip keeps the sign, so it undoes itself.
            #[inline(always)]
            fn from_key(key: $i) -> Self {
                Self(Self(key as $u).key() as $u)
            }

            /// `other`, unless one of the two operands is NaN: then that one.
            #[inline(always)]
            fn nan_or(a: Self, b: Self, other: Self) -> Self {
                let (a_is_nan, b_is_nan) = (a.is_nan(), b.is_nan());
                let other = if b_is_nan { b } else { other };
                if a_is_nan { a } else { other }
            }
        }

        impl<const MOST: $u> Op<$name<MOST>> for Min {
            #[inline(always)]
            fn apply(a: $name<MOST>, b: $name<MOST>) -> $name<MOST> {
                $name::nan_or(a, b, $name::from_key(a.key().min(b.key())))
            }
        }

        impl<const MOST: $u> Op<$name<MOST>> for Max {
            #[inline(always)]
            fn apply(a: $name<MOST>, b: $name<MOST>) -> $name<MOST> {
                $name::nan_or(a, b, $name::from_key(a.key().max(b.key())))
            }
        }
    };
}
bits!(Bits8, u8, i8, "8");
bits!(Bits16, u16, i16, "16");
