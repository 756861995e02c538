//! 8-bit floats: sums and products in `f32`, rounded at every pairwise step, minimum and maximum on the bits.

use super::bits::Bits8;
use super::ops::{Map, Op, Prod, Scaled, Sum};
use super::scale::Times;
use tinynccl_plan::float8::{F8E4M3, F8E5M2};

macro_rules! through_f32 {
    ($($unit:ident: $t:ident),*) => {$(
        /// One of them.
        pub(super) type $unit = Bits8<{ $t::LARGEST }>;

        through_f32!(@operator $unit, $t, Sum);
        through_f32!(@operator $unit, $t, Prod);

        impl Map<$unit> for Times<f32> {
            #[inline(always)]
            fn map(&self, x: $unit) -> $unit {
                Bits8($t::from_f32($t::from_bits(x.0).to_f32() * self.0).to_bits())
            }
        }

        impl Scaled for $unit {
            type Times = Times<f32>;

            #[inline(always)]
            fn times(factor: f64) -> Times<f32> {
                Times(factor as f32)
            }
        }
    )*};
    (@operator $unit:ident, $t:ident, $op:ty) => {
        impl Op<$unit> for $op {
            #[inline(always)]
            fn apply(a: $unit, b: $unit) -> $unit {
                Bits8($t::from_f32(Self::apply($t::from_bits(a.0).to_f32(), $t::from_bits(b.0).to_f32())).to_bits())
            }
        }
    };
}
through_f32!(E4M3: F8E4M3, E5M2: F8E5M2);
