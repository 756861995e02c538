//! Exact sums of f32 with AVX-512: the compiler would take half of each register for the magnitudes.

use std::arch::x86_64::*;

use super::exact::{Terms, one, rest};

/// Elements of a register.
const LANES: usize = 16;

/// [`super::exact::ExactFn`] of f32, for [`Level::Avx512`](super::Level::Avx512).
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn sum(sources: &[*const u8], out: *mut u8, n: usize, divisor: f64) {
    let whole = n / LANES * LANES;
    // SAFETY: forwarded from the caller: all of them hold `n` elements.
    unsafe {
        // Sums, and quotients by a power of two.
        if divisor.to_bits() << 12 == 0 {
            let terms = Terms::new::<f32>(sources.len(), divisor);
            let pairs = whole / (2 * LANES) * (2 * LANES);
            for at in (0..pairs).step_by(2 * LANES) {
                registers::<2>(sources, out, at, &terms);
            }
            if pairs < whole {
                registers::<1>(sources, out, pairs, &terms);
            }
            rest::<f32>(sources, out, whole..n, divisor);
        } else {
            super::simd::avx512::exact::<f32>(sources, out, n, divisor);
        }
    }
}

/// `N` registers of elements from `at` on.
///
/// # Safety
/// As [`super::exact::ExactFn`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn registers<const N: usize>(sources: &[*const u8], out: *mut u8, at: usize, terms: &Terms) {
    let (magnitude, one_less) = (_mm512_set1_epi32(i32::MAX), _mm512_set1_epi32(-1));
    let mut sums = [[_mm512_set1_pd(-0.0); 2]; N];
    let (mut most, mut least) = ([_mm512_setzero_si512(); N], [one_less; N]);
    for source in sources {
        for i in 0..N {
            // SAFETY: by the caller.
            let values = unsafe { _mm512_loadu_ps(source.cast::<f32>().add(at + i * LANES)) };
            let halves = [_mm512_castps512_ps256(values), _mm512_extractf32x8_ps::<1>(values)];
            for (sum, half) in sums[i].iter_mut().zip(halves) {
                *sum = _mm512_add_pd(*sum, _mm512_cvtps_pd(half));
            }
            let bits = _mm512_and_si512(_mm512_castps_si512(values), magnitude);
            most[i] = _mm512_max_epu32(most[i], bits);
            // Zeros have every exponent.
            least[i] = _mm512_min_epu32(least[i], _mm512_add_epi32(bits, one_less));
        }
    }
    let (apart, reciprocal) = (_mm512_set1_epi32(terms.apart() as i32), _mm512_set1_pd(1.0 / terms.divisor()));
    for i in 0..N {
        let [low, high] = sums[i].map(|sum| _mm512_cvtpd_ps(_mm512_mul_pd(sum, reciprocal)));
        let values = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        let values = _mm512_mask_blend_ps(nan, values, _mm512_set1_ps(f32::NAN));
        let exponent = |bits| _mm512_srli_epi32::<23>(bits);
        let bound = _mm512_add_epi32(exponent(_mm512_sub_epi32(least[i], one_less)), apart);
        let mut far = _mm512_cmpgt_epu32_mask(exponent(most[i]), bound);
        let first = at + i * LANES;
        let to = out.cast::<f32>().wrapping_add(first);
        if far == 0 {
            // SAFETY: by the caller; every source was read up to here.
            unsafe { _mm512_storeu_ps(to, values) };
            continue;
        }
        let mut block = [0f32; LANES];
        // SAFETY: as above; the block is as long as a register.
        unsafe { _mm512_storeu_ps(block.as_mut_ptr(), values) };
        while far != 0 {
            let lane = far.trailing_zeros() as usize;
            // SAFETY: by the caller.
            block[lane] = unsafe { one::<f32>(sources, first + lane, terms.divisor()) };
            far &= far - 1;
        }
        // SAFETY: as above.
        unsafe { to.copy_from_nonoverlapping(block.as_ptr(), LANES) };
    }
}
