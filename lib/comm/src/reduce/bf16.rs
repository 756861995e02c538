//! bfloat16 sums and products, two elements to a 32-bit unit.
//!
//! A bf16 is the upper half of an `f32`. In a 32-bit word that holds two of them, one is an `f32` after a shift and the
//! other after a mask, and the results go back the same way. No widening, narrowing or shuffling is needed, which
//! is most of the cost of the plain one-element loop.

use super::bits::Bits16;
use super::exact::SumOfTwo;
use super::ops::{Map, Op, Prod, Scaled, Sum, Unit};
use super::scale::Times;

/// One bf16, for min and max.
pub(super) type Bf16 = Bits16<0x7f80>;

/// Two neighbouring bf16, aligned as one.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
pub(super) struct Bf16Pair(u32);

// SAFETY: four bytes hold two elements; packed to the alignment of one; any bits are valid.
unsafe impl Unit for Bf16Pair {
    const ELEMENTS: usize = 2;
}

/// The `f32`s of the lower and the upper half of a word.
#[inline(always)]
fn widen(pair: Bf16Pair) -> (f32, f32) {
    let bits = pair.0;
    (f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000))
}

#[inline(always)]
fn narrow(low: f32, high: f32) -> Bf16Pair {
    Bf16Pair((round(low) >> 16) | (round(high) & 0xffff_0000))
}

/// Rounds the upper half of an `f32`'s bits to nearest even; the lower half is then to be dropped.
///
/// NaN needs no care here: arithmetic yields either the default NaN or that of an operand, made quiet, and all operands
/// are widened bf16. Both have a lower half of zeros, which rounds to itself.
#[inline(always)]
fn round(value: f32) -> u32 {
    let bits = value.to_bits();
    bits.wrapping_add(0x7fff + ((bits >> 16) & 1))
}

macro_rules! through_f32 {
    ($($op:ty),*) => {$(
        impl Op<Bf16Pair> for $op {
            #[inline(always)]
            fn apply(a: Bf16Pair, b: Bf16Pair) -> Bf16Pair {
                let ((a_low, a_high), (b_low, b_high)) = (widen(a), widen(b));
                narrow(Self::apply(a_low, b_low), Self::apply(a_high, b_high))
            }
        }
    )*};
}
through_f32!(Sum, SumOfTwo, Prod);

impl Map<Bf16Pair> for Times<f32> {
    #[inline(always)]
    fn map(&self, x: Bf16Pair) -> Bf16Pair {
        let (low, high) = widen(x);
        narrow(low * self.0, high * self.0)
    }
}

impl Scaled for Bf16Pair {
    type Times = Times<f32>;

    #[inline(always)]
    fn times(factor: f64) -> Times<f32> {
        Times(factor as f32)
    }
}
