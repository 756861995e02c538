//! Exact sums of f16 and bf16 in registers: all operands of an element in `f32`, their magnitudes in 16 bits.

use std::arch::x86_64::*;

use super::bits::Bits16;
use super::exact::{Element, Terms, one};
use super::f16::F16;
use super::f16c::{one_nan_256, one_nan_512};

type Bf16 = Bits16<0x7f80>;

/// An element of 16 bits.
trait Halves: Element {
    /// bf16, and not f16.
    const IS_BF16: bool;
}
impl Halves for Bf16 {
    const IS_BF16: bool = true;
}
impl Halves for F16 {
    const IS_BF16: bool = false;
}

/// bf16: the even elements of a register and the odd ones. f16: the lower half and the upper one.
macro_rules! width {
    ($name:ident, $features:literal: $i:ty, $f:ty, elements $elements:literal, bits per element $bits:literal,
     $load:ident $store:ident $and:ident $or:ident $zero:ident $max16:ident $min16:ident $add16:ident $set16:ident
     $left:ident $right:ident $right16:ident $add32:ident $set32:ident $float:ident $int:ident
     $add:ident $mul:ident $set:ident $widen:ident $low:ident $high:ident::<$one:literal>
     $narrow:ident::<$nearest:ident> $join:ident $grow:ident $one_nan:ident $far:ident) => {
        pub(super) mod $name {
            use super::*;

            /// As [`ExactFn`](crate::reduce::exact::ExactFn), for divisors whose reciprocals are exact.
            #[target_feature(enable = $features)]
            unsafe fn sum<E: Halves>(sources: &[*const u8], out: *mut u8, n: usize, divisor: f64) {
                let terms = Terms::new::<E>(sources.len(), divisor);
                let whole = n / $elements * $elements;
                let (magnitude, one_less) = ($set16(0x7fff), $set16(-1));
                let reciprocal = $set((1.0 / divisor) as f32);
                for at in (0..whole).step_by($elements) {
                    let mut sums = [$set(-0.0); 2];
                    let (mut most, mut least) = ($zero(), one_less);
                    for source in sources {
                        // SAFETY: by the caller the source holds a register from `at` on.
                        let values = unsafe { $load(source.add(2 * at).cast()) };
                        let halves: [$f; 2] = if E::IS_BF16 {
                            [$float($left::<16>(values)), $float($and(values, $set32(0xffff_0000u32 as i32)))]
                        } else {
                            [$widen($low(values)), $widen($high::<$one>(values))]
                        };
                        sums = [$add(sums[0], halves[0]), $add(sums[1], halves[1])];
                        let bits = $and(values, magnitude);
                        most = $max16(most, bits);
                        // Zeros have every exponent.
                        least = $min16(least, $add16(bits, one_less));
                    }
                    let [even, odd] = sums.map(|sum| $one_nan($mul(sum, reciprocal)));
                    let results: $i = if E::IS_BF16 {
                        let rounded = |sum: $f| {
                            let bits = $int(sum);
                            let last = $and($right::<16>(bits), $set32(1));
                            $add32(bits, $add32(last, $set32(0x7fff)))
                        };
                        $or($right::<16>(rounded(even)), $and(rounded(odd), $set32(0xffff_0000u32 as i32)))
                    } else {
                        $join::<1>($grow($narrow::<$nearest>(even)), $narrow::<$nearest>(odd))
                    };
                    let exponent = |bits: $i| if E::IS_BF16 { $right16::<7>(bits) } else { $right16::<10>(bits) };
                    let high = exponent(most);
                    let bound = $add16(exponent($add16(least, $set16(1))), $set16(terms.apart_narrow() as i16));
                    // Above it sums may overflow.
                    let most = $set16(terms.most() as i16 - 1);
                    let mut far = $far(high, $min16(bound, most));
                    let mut block = [0u16; $elements];
                    // SAFETY: by the caller; every source was read up to here.
                    unsafe {
                        if far == 0 {
                            $store(out.add(2 * at).cast(), results);
                            continue;
                        }
                        $store(block.as_mut_ptr().cast(), results);
                        while far != 0 {
                            let lane = far.trailing_zeros() as usize / $bits;
                            block.as_mut_ptr().add(lane).cast::<E>().write(one::<E>(sources, at + lane, divisor));
                            far &= !(((1 << $bits) - 1) << (lane * $bits));
                        }
                        out.add(2 * at).copy_from_nonoverlapping(block.as_ptr().cast(), 2 * $elements);
                    }
                }
                // SAFETY: by the caller.
                unsafe { crate::reduce::exact::rest::<E>(sources, out, whole..n, divisor) };
            }

            pub(in super::super) unsafe fn bf16(sources: &[*const u8], out: *mut u8, n: usize, divisor: f64) {
                // SAFETY: forwarded from the caller, who has the features.
                unsafe { sum::<Bf16>(sources, out, n, divisor) }
            }

            pub(in super::super) unsafe fn f16(sources: &[*const u8], out: *mut u8, n: usize, divisor: f64) {
                // SAFETY: see above.
                unsafe { sum::<F16>(sources, out, n, divisor) }
            }
        }
    };
}

/// The 512-bit conversion requires the flag that exceptions stay masked.
const NEAREST_512: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

width!(avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl": __m512i, __m512, elements 32, bits per element 1,
    _mm512_loadu_si512 _mm512_storeu_si512 _mm512_and_si512 _mm512_or_si512 _mm512_setzero_si512
    _mm512_max_epu16 _mm512_min_epu16 _mm512_add_epi16 _mm512_set1_epi16
    _mm512_slli_epi32 _mm512_srli_epi32 right16_512 _mm512_add_epi32 _mm512_set1_epi32 _mm512_castsi512_ps _mm512_castps_si512
    _mm512_add_ps _mm512_mul_ps _mm512_set1_ps _mm512_cvtph_ps _mm512_castsi512_si256 _mm512_extracti64x4_epi64::<1>
    _mm512_cvtps_ph::<NEAREST_512> _mm512_inserti64x4 _mm512_castsi256_si512 one_nan_512 _mm512_cmpgt_epu16_mask);
width!(avx2, "avx2,fma,f16c": __m256i, __m256, elements 16, bits per element 2,
    _mm256_loadu_si256 _mm256_storeu_si256 _mm256_and_si256 _mm256_or_si256 _mm256_setzero_si256
    _mm256_max_epu16 _mm256_min_epu16 _mm256_add_epi16 _mm256_set1_epi16
    _mm256_slli_epi32 _mm256_srli_epi32 _mm256_srli_epi16 _mm256_add_epi32 _mm256_set1_epi32 _mm256_castsi256_ps _mm256_castps_si256
    _mm256_add_ps _mm256_mul_ps _mm256_set1_ps _mm256_cvtph_ps _mm256_castsi256_si128 _mm256_extracti128_si256::<1>
    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT> _mm256_inserti128_si256 _mm256_castsi128_si256 one_nan_256 far_256);

/// With the type of the shift that 256 bits have.
#[inline]
#[target_feature(enable = "avx512bw")]
fn right16_512<const BITS: i32>(x: __m512i) -> __m512i {
    match BITS {
        7 => _mm512_srli_epi16::<7>(x),
        _ => _mm512_srli_epi16::<10>(x),
    }
}

/// Two bits for each element of `a` that is above that of `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn far_256(a: __m256i, b: __m256i) -> u32 {
    !_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_max_epu16(a, b), b)) as u32
}
