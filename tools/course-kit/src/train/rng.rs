//! A small random generator, the same on every machine and for every version of this program.
//!
//! SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): one 64-bit counter and a mixing function. Not cryptographic.

/// Generator state.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose sequence depends on `seed` alone.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`, 24 bits.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Normal with mean 0 and variance 1 (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// `0..n` in random order (Fisher and Yates).
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, (self.next_u64() % (i as u64 + 1)) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_reference_sequence() {
        // First outputs of the authors' C code for seed 1234567.
        let mut rng = Rng::new(1234567);
        assert_eq!([rng.next_u64(), rng.next_u64()], [6457827717110365317, 3203168211198807973]);
    }

    #[test]
    fn moments_are_right() {
        let mut rng = Rng::new(1);
        let n = 20_000;
        let values: Vec<f32> = (0..n).map(|_| rng.normal()).collect();
        let mean = values.iter().sum::<f32>() / n as f32;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / n as f32;
        approx::assert_abs_diff_eq!(mean, 0.0, epsilon = 0.03);
        approx::assert_abs_diff_eq!(variance, 1.0, epsilon = 0.05);
    }

    #[test]
    fn a_permutation_has_every_index_once() {
        let mut order = Rng::new(7).permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
