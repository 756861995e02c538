//! Loops that the compiler vectorises: compiled twice, for the baseline and for AVX2, and chosen at run time.

/// Lanes of the accumulators in reductions: two AVX2 registers. The order of additions is fixed by this, not by the
/// CPU.
pub const LANES: usize = 16;

/// Defines a function whose body is compiled for the baseline CPU and for AVX2, and picks one at run time.
///
/// Multiplication and addition stay separate instructions in both, so that both give the same bits.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the CPU has AVX2, the one thing `avx2` asks for.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

pub(crate) use simd_fn;

/// e^x to about 1e-7 relative for x in [-87, 88]; outside, the value at the nearer end. NaN stays NaN.
///
/// Cephes' `expf`: x = n·ln 2 + r, a polynomial for e^r, and n put into the exponent bits. No branch, no call: it
/// vectorises.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5·2^23 rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    (p * r * r + r + 1.0) * power
}

/// Sum of `f([a[i], b[i], …])` over equally long slices, in a fixed order over [`LANES`] accumulators.
#[inline(always)]
pub fn sum<const N: usize>(slices: [&[f32]; N], f: impl Fn([f32; N]) -> f32) -> f32 {
    let n = slices[0].len();
    let mut lanes = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    let mut i = 0;
    while i < whole {
        // One bounds check per slice and block, none in the loop below.
        let blocks = slices.map(|s| &s[i..i + LANES]);
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane += f(blocks.map(|b| b[j]));
        }
        i += LANES;
    }
    for (lane, i) in lanes.iter_mut().zip(whole..n) {
        *lane += f(slices.map(|s| s[i]));
    }
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Largest value of a slice; -inf when empty.
#[inline(always)]
pub fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = if v > *lane { v } else { *lane };
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = if v > *lane { v } else { *lane };
    }
    lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

simd_fn! {
    /// Sum of squares of a slice, in f64 over blocks of 4096, so that a long one stays exact to about 1e-6.
    pub fn sum_of_squares(values: &[f32]) -> f64 {
        values.chunks(4096).map(|block| f64::from(sum([block], |[v]| v * v))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_good_to_a_few_ulp() {
        let mut worst = 0.0f64;
        for i in -86_999..=87_999 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        assert!(worst < 3e-7, "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        approx::assert_abs_diff_eq!(exp(-1e30), 0.0, epsilon = 1e-37);
    }

    #[test]
    fn sums_of_any_length() {
        for n in 0..70 {
            let v: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(sum([&v], |[v]| v), (0..n).sum::<usize>() as f32);
            assert_eq!(max(&v), if n == 0 { f32::NEG_INFINITY } else { (n - 1) as f32 });
        }
        approx::assert_abs_diff_eq!(sum_of_squares(&vec![0.1; 100_000]), 1000.0, epsilon = 1e-3);
    }
}
