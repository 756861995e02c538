//! The two 8-bit floats of "FP8 formats for deep learning" (Micikevicius et al., 2022), which `half` does not have.
//!
//! Conversions are PyTorch's: to nearest, ties to even. Values that are too large become NaN (`F8E4M3`, which has no
//! infinity) or infinity (`F8E5M2`). NCCL's and CUDA's conversions saturate at the greatest finite value, which hides
//! overflow. All functions are branch-free, so that loops over them vectorise.

use std::fmt;

/// 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa: up to 448 and no infinity; PyTorch's `float8_e4m3fn`.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(u8);

/// 1 bit of sign, 5 of exponent (bias 15), 2 of mantissa: up to 57344; PyTorch's `float8_e5m2`.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(u8);

/// `1 / 2^bits` of a last place, as a float whose own last place it is: adding it rounds to that place.
const fn last_place_is(exponent: u32) -> u32 {
    (exponent + 23 + 127 - 256) << 23
}

macro_rules! float8 {
    (
        $t:ident: mantissa $mantissa:literal, bias $bias:literal, largest magnitude $largest:literal,
        from $special:literal on ($specials:literal), too large from $too_large:literal on: $overflow:literal
    ) => {
        impl $t {
            /// Magnitude bits above which there are only NaNs.
            pub const LARGEST: u8 = $largest;

            /// The value with these bits.
            #[inline(always)]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits.
            #[inline(always)]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Returns true for a NaN.
            #[inline(always)]
            pub const fn is_nan(self) -> bool {
                self.0 & 0x7f > Self::LARGEST
            }

            /// Its exact value.
            #[inline(always)]
            pub fn to_f32(self) -> f32 {
                /// The difference of the two biases, as a factor. Multiplying makes subnormals right too.
                const REBIAS: f32 = f32::from_bits((127 + 127 - $bias) << 23);
                let magnitude = u32::from(self.0 & 0x7f);
                let sign = u32::from(self.0 & 0x80) << 24;
                let finite = (f32::from_bits(magnitude << (23 - $mantissa)) * REBIAS).to_bits();
                let special = if magnitude >= $special { $specials } else { 0 };
                f32::from_bits(finite | special | sign)
            }

            /// The nearest value, ties to even.
            #[inline(always)]
            pub fn from_f32(value: f32) -> Self {
                const MAGIC: u32 = last_place_is(256 + 1 - $bias - $mantissa);
                const DROPPED: u32 = 23 - $mantissa;
                let bits = value.to_bits();
                let magnitude = bits & 0x7fff_ffff;
                let subnormal = (f32::from_bits(magnitude) + f32::from_bits(MAGIC)).to_bits().wrapping_sub(MAGIC);
                // Change of the bias and half a last place less one; the odd bit adds the rest on ties.
                let half = (1 << (DROPPED - 1)) - 1;
                let odd = (magnitude >> DROPPED) & 1;
                let normal = magnitude.wrapping_sub(((127 - $bias) << 23) - half).wrapping_add(odd) >> DROPPED;
                let small = if magnitude < (128 - $bias) << 23 { subnormal } else { normal };
                let large = if magnitude > 0x7f80_0000 { 0x7f } else { $overflow };
                let rounded = if magnitude >= $too_large { large } else { small };
                Self((rounded | ((bits >> 24) & 0x80)) as u8)
            }
        }

        impl PartialEq for $t {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $t {
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}

// 480 would follow 448 if it were not NaN.
float8!(F8E4M3: mantissa 3, bias 7, largest magnitude 0x7e, from 0x7f on (0x7fc0_0000), too large from 0x43f0_0000 on: 0x7f);
// 2^16.
float8!(F8E5M2: mantissa 2, bias 15, largest magnitude 0x7c, from 0x7c on (0x7f80_0000), too large from 0x4780_0000 on: 0x7c);

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of bits by the definition of the format; `None`: NaN.
    fn value(bits: u8, mantissa: u32, bias: i32, infinity: bool) -> Option<f64> {
        let (exponent, fraction) = (i32::from(bits & 0x7f) >> mantissa, i32::from(bits) & ((1 << mantissa) - 1));
        let most = (1 << (7 - mantissa)) - 1;
        let magnitude = match (infinity, exponent == most, fraction) {
            (true, true, 0) => f64::INFINITY,
            (true, true, _) => return None,
            (false, true, f) if f == (1 << mantissa) - 1 => return None,
            _ if exponent == 0 => f64::from(fraction) * 2f64.powi(1 - bias - mantissa as i32),
            _ => (1.0 + f64::from(fraction) / f64::from(1 << mantissa)) * 2f64.powi(exponent - bias),
        };
        Some(if bits & 0x80 == 0 { magnitude } else { -magnitude })
    }

    /// The nearest of all finite values and the one that would follow them; ties go to even bits.
    fn nearest(x: f32, mantissa: u32, bias: i32, infinity: bool) -> u8 {
        let sign = (x.to_bits() >> 24 & 0x80) as u8;
        if x.is_nan() {
            return 0x7f | sign;
        }
        let overflow = if infinity { 0x7c } else { 0x7f };
        let behind = if infinity { 65536.0 } else { 480.0 };
        let values = (0..overflow).filter_map(|b| value(b, mantissa, bias, infinity).map(|v| (b, v)));
        let x = f64::from(x.abs());
        if x >= behind {
            return overflow | sign;
        }
        let distance = |v: f64| (x - v).abs();
        let best = values
            .chain([(overflow, behind)])
            .min_by(|(a, va), (b, vb)| distance(*va).total_cmp(&distance(*vb)).then((a & 1).cmp(&(b & 1))));
        best.map_or(0, |(b, _)| b) | sign
    }

    macro_rules! exhaustive {
        ($name:ident, $t:ident, $mantissa:literal, $bias:literal, $infinity:literal) => {
            #[test]
            fn $name() {
                let (mut inputs, mut finite) = (Vec::new(), Vec::new());
                for bits in 0..=u8::MAX {
                    let ours = $t::from_bits(bits);
                    match value(bits, $mantissa, $bias, $infinity) {
                        None => assert!(ours.is_nan() && ours.to_f32().is_nan(), "{bits:#04x}"),
                        Some(v) => {
                            assert!(!ours.is_nan());
                            assert_eq!(f64::from(ours.to_f32()).to_bits(), v.to_bits(), "{bits:#04x}");
                            assert_eq!($t::from_f32(ours.to_f32()).to_bits(), bits);
                            finite.push(v as f32);
                        }
                    }
                }
                // All sums, products and quotients of two, and what lies on, just above and just below each tie.
                for &a in &finite {
                    for &b in &finite {
                        inputs.extend([a + b, a * b, a / b, (a + b) / 2.0]);
                    }
                }
                for exponent in 0..=255u32 {
                    for fraction in 0..32u32 {
                        let tie = exponent << 23 | fraction << 18;
                        inputs.extend([tie.wrapping_sub(1), tie, tie + 1].map(f32::from_bits));
                    }
                }
                inputs.sort_unstable_by(f32::total_cmp);
                inputs.dedup_by_key(|x| x.to_bits());
                for x in inputs.into_iter().flat_map(|x| [x, -x]) {
                    let (ours, want) = ($t::from_f32(x), nearest(x, $mantissa, $bias, $infinity));
                    assert!(ours.to_bits() == want || x.is_nan() && ours.is_nan(), "{x:e}: {:#x} {want:#x}", ours.0);
                }
            }
        };
    }
    exhaustive!(e4m3_of_every_value, F8E4M3, 3, 7, false);
    exhaustive!(e5m2_of_every_value, F8E5M2, 2, 15, true);

    #[test]
    fn what_is_too_large_shows() {
        assert_eq!(F8E4M3::from_f32(464.0).to_f32(), 448.0);
        assert!(F8E4M3::from_f32(465.0).is_nan() && F8E4M3::from_f32(f32::INFINITY).is_nan());
        assert_eq!(F8E5M2::from_f32(61439.0).to_f32(), 57344.0);
        assert_eq!(F8E5M2::from_f32(-61440.0).to_f32(), f32::NEG_INFINITY);
    }
}
