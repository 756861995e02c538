//! Counter-based random numbers: a value is a hash of a seed and of counters, so that it does not depend on who asks
//! first.
//!
//! The mixers are SplitMix64 (Steele, Lea, Flood 2014) for keys and Chris Wellons' `lowbias32` for the 32-bit stream
//! that dropout draws one value per activation from.

/// Streams that must not overlap: the first counter of every key.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum Stream {
    /// Initial parameters.
    Init = 1,
    /// Start positions of training samples.
    Batch = 2,
    /// Start positions of evaluation samples.
    Eval = 3,
    /// Dropout masks.
    Dropout = 4,
    /// Characters drawn by the sampler.
    Sample = 5,
}

/// SplitMix64's output function: a bijection that mixes all bits.
#[inline]
pub fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 64 bits that depend on the seed, the stream and every counter.
pub fn key(seed: u64, stream: Stream, counters: &[u64]) -> u64 {
    let absorb = |state: u64, word: u64| mix64(state.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix64(word));
    counters.iter().fold(absorb(mix64(seed), stream as u64), |state, &word| absorb(state, word))
}

/// Maps 64 random bits to `0..n` (bias below n / 2^64).
pub fn below(bits: u64, n: usize) -> usize {
    ((u128::from(bits) * n as u128) >> 64) as usize
}

/// Maps 64 random bits to [0, 1).
pub fn uniform(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Two independent standard normal values from two independent 64-bit words (Box and Muller).
pub fn normal_pair(a: u64, b: u64) -> (f64, f64) {
    let radius = (-2.0 * (1.0 - uniform(a)).ln()).sqrt();
    let angle = std::f64::consts::TAU * uniform(b);
    (radius * angle.cos(), radius * angle.sin())
}

/// 32 random bits for counter `index` under a key; a handful of integer operations, which the compiler vectorises.
#[inline(always)]
pub fn bits32(key: u64, index: u32) -> u32 {
    let mut x = index.wrapping_mul(0x9e37_79b9) ^ key as u32;
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_add((key >> 32) as u32).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_every_counter() {
        let base = key(1, Stream::Dropout, &[2, 3]);
        for other in [
            key(2, Stream::Dropout, &[2, 3]),
            key(1, Stream::Batch, &[2, 3]),
            key(1, Stream::Dropout, &[3, 2]),
            key(1, Stream::Dropout, &[2, 3, 0]),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, key(1, Stream::Dropout, &[2, 3]));
    }

    #[test]
    fn normal_values_have_mean_zero_and_variance_one() {
        let n = 100_000u64;
        let (mut sum, mut squares) = (0.0, 0.0);
        for i in 0..n {
            let (a, b) = normal_pair(key(7, Stream::Init, &[2 * i]), key(7, Stream::Init, &[2 * i + 1]));
            sum += a + b;
            squares += a * a + b * b;
        }
        let count = 2.0 * n as f64;
        approx::assert_abs_diff_eq!(sum / count, 0.0, epsilon = 0.01);
        approx::assert_abs_diff_eq!(squares / count, 1.0, epsilon = 0.02);
    }

    #[test]
    fn below_covers_its_range() {
        let mut seen = [0; 7];
        for i in 0..7000 {
            seen[below(key(3, Stream::Batch, &[i]), 7)] += 1;
        }
        assert!(seen.iter().all(|&c| (800..1200).contains(&c)), "{seen:?}");
    }
}
