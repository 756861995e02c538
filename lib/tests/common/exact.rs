//! Exact sums by their definition, in integers of any length; the tests of the library and of its reductions use them.

use half::{bf16, f16};

/// A float by its bits.
pub trait Float: Copy + std::fmt::Debug + 'static {
    /// Bits of the infinity, above those of every number.
    const INFINITY: u32;
    /// The sign's bit.
    const SIGN: u32;
    /// The float with these bits.
    fn of(bits: u32) -> Self;
    /// Its bits.
    fn bits(self) -> u32;
    /// Magnitude of a value near this one.
    fn near(x: f64) -> u32;
    /// Value of a magnitude; the infinity's is that of one more number.
    fn value(magnitude: u32) -> f64;
}

macro_rules! float {
    ($($t:ty, $bits:ty, $near:expr, exponents $exponents:literal, fraction $fraction:literal;)*) => {$(
        impl Float for $t {
            const INFINITY: u32 = ((1 << $exponents) - 1) << $fraction;
            const SIGN: u32 = 1 << ($exponents + $fraction);
            fn of(bits: u32) -> Self { <$t>::from_bits(bits as $bits) }
            fn bits(self) -> u32 { self.to_bits().into() }
            fn near(x: f64) -> u32 { Float::bits(($near)(x.abs())).min(<Self as Float>::INFINITY) }
            fn value(magnitude: u32) -> f64 {
                let (exponent, fraction) = (magnitude >> $fraction, magnitude & ((1 << $fraction) - 1));
                let whole = fraction + if exponent > 0 { 1 << $fraction } else { 0 };
                let bias = (1 << ($exponents - 1)) - 1;
                f64::from(whole) * 2f64.powi(exponent.max(1) as i32 - bias - $fraction)
            }
        }
    )*};
}
float! {
    f32, u32, |x: f64| x as f32, exponents 8, fraction 23;
    bf16, u16, bf16::from_f64, exponents 8, fraction 7;
    f16, u16, f16::from_f64, exponents 5, fraction 10;
}

/// Digits of 32 bits with a sign each, in units of 2^-256.
#[derive(Clone)]
struct Large([i64; 20]);

impl Large {
    fn zero() -> Large {
        Large([0; 20])
    }

    /// Adds `times` a value that has at most 53 bits, above 2^-256.
    fn add(&mut self, value: f64, times: i64) {
        let mut rest = value.abs() * 2f64.powi(256);
        for (at, digit) in self.0.iter_mut().enumerate().rev() {
            let unit = 2f64.powi(32 * at as i32);
            let part = (rest / unit).floor();
            rest -= part * unit;
            *digit += part as i64 * if value < 0.0 { -times } else { times };
        }
        assert_eq!(rest, 0.0);
    }

    fn sign(&self) -> i64 {
        let mut digits = self.0;
        for at in 0..19 {
            digits[at + 1] += digits[at].div_euclid(1 << 32);
            digits[at] = digits[at].rem_euclid(1 << 32);
        }
        if digits[19] < 0 { -1 } else { i64::from(digits.iter().any(|&digit| digit > 0)) }
    }
}

/// The value nearest to the sum over `divisor`, found by bisection: integers decide all comparisons.
pub fn nearest<T: Float>(operands: &[T], divisor: i64) -> u32 {
    let magnitude = |x: T| x.bits() & !T::SIGN;
    let nan = T::INFINITY | (T::SIGN >> 1) & !T::INFINITY | half_of_fraction::<T>();
    let infinite = |sign| operands.iter().any(|&x| x.bits() == T::INFINITY | sign);
    if operands.iter().any(|&x| magnitude(x) > T::INFINITY) || infinite(0) && infinite(T::SIGN) {
        return nan;
    }
    if infinite(0) || infinite(T::SIGN) {
        return T::INFINITY | if infinite(T::SIGN) { T::SIGN } else { 0 };
    }
    let mut sum = Large::zero();
    for &x in operands {
        sum.add(T::value(magnitude(x)), if x.bits() & T::SIGN != 0 { -1 } else { 1 });
    }
    let sign = match sum.sign() {
        0 => return if operands.iter().all(|&x| x.bits() == T::SIGN) { T::SIGN } else { 0 },
        sign => sign,
    };
    // |sum| - divisor (low + high) / 2, times two.
    let beyond_middle = |low: u32| {
        let mut difference = Large::zero();
        difference.0.iter_mut().zip(sum.0).for_each(|(d, s)| *d = 2 * sign * s);
        difference.add(T::value(low), -divisor);
        difference.add(T::value(low + 1), -divisor);
        difference.sign()
    };
    // The smallest one whose middle to the next is not before the sum.
    let (mut low, mut high) = (0, T::INFINITY);
    // It is likely to be here; if it is not, the search goes on.
    let near = T::near(
        operands
            .iter()
            .map(|x| T::value(magnitude(*x)) * if x.bits() & T::SIGN != 0 { -1.0 } else { 1.0 })
            .sum::<f64>()
            / divisor as f64,
    );
    for middle in [near, near.saturating_sub(1), near + 1] {
        match middle {
            _ if middle < low || middle >= high => {}
            _ if beyond_middle(middle) > 0 => low = middle + 1,
            _ => high = middle,
        }
    }
    while low < high {
        let middle = (low + high) / 2;
        if beyond_middle(middle) > 0 { low = middle + 1 } else { high = middle }
    }
    if low < T::INFINITY && beyond_middle(low) == 0 {
        low += low & 1;
    }
    low | if sign < 0 { T::SIGN } else { 0 }
}

/// The fraction's first bit, which makes a NaN a quiet one.
fn half_of_fraction<T: Float>() -> u32 {
    let fraction = T::INFINITY & T::INFINITY.wrapping_neg();
    fraction >> 1
}

/// Operands that are hard to add: cancellations, ties and what breaks them, the ends of the range.
pub fn hard<T: Float>(seed: u64, ranks: usize) -> Vec<T> {
    let mut state = seed;
    let mut next = move || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as u32
    };
    let all = T::SIGN | (T::SIGN - 1);
    let fraction = T::INFINITY & T::INFINITY.wrapping_neg();
    let mut operands: Vec<T> = Vec::new();
    let kind = next() % 8;
    while operands.len() < ranks {
        let any = next() & all;
        let finite = if any & T::INFINITY == T::INFINITY { any & !fraction } else { any };
        let bits = match kind {
            // Anything, NaN too.
            0 => any,
            // The opposite of an earlier one, or one beside it.
            1 | 2 if !operands.is_empty() && next() % 2 == 0 => {
                let other = operands[next() as usize % operands.len()].bits() ^ T::SIGN;
                if next() % 2 == 0 || other & (T::SIGN - 1) == 0 { other } else { other - 1 }
            }
            // Powers of two: ties.
            3 => finite & (T::SIGN | T::INFINITY),
            // Of about one size.
            4 => (T::INFINITY / 2 + (any & (4 * fraction - 1))) | any & T::SIGN,
            // Near the smallest.
            5 => any & (T::SIGN | (2 * fraction - 1)),
            // Near the greatest, and a bit more.
            6 => (T::INFINITY - 1 - (any & 3)) | if next() % 3 == 0 { T::SIGN } else { 0 },
            7 if next() % 2 == 0 => {
                if next() % 2 == 0 {
                    T::SIGN
                } else {
                    0
                }
            }
            _ => finite,
        };
        operands.push(T::of(bits));
    }
    operands
}
