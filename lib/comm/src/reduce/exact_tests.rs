//! Exact sums beside their definition, in integers of any length.

use half::{bf16, f16};
use proptest::prelude::*;

use super::exact::{Exact, covers};
use super::{Combination, Level};
use tinynccl_plan::dtype::{DType, ReduceOp};

/// A float as an integer in units of 2^-200, and back as the question that decides its rounding.
trait Float: Copy + std::fmt::Debug + 'static {
    const DTYPE: DType;
    const INFINITY: u32;
    const SIGN: u32;
    fn of(bits: u32) -> Self;
    fn bits(self) -> u32;
    /// By magnitude: subnormals and normals alike, the infinity as if it was one more.
    fn value(magnitude: u32) -> f64;
}

macro_rules! float {
    ($($t:ty, $bits:ty, $dtype:ident, exponents $exponents:literal, fraction $fraction:literal;)*) => {$(
        impl Float for $t {
            const DTYPE: DType = DType::$dtype;
            const INFINITY: u32 = ((1 << $exponents) - 1) << $fraction;
            const SIGN: u32 = 1 << ($exponents + $fraction);
            fn of(bits: u32) -> Self { <$t>::from_bits(bits as $bits) }
            fn bits(self) -> u32 { self.to_bits().into() }
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
    f32, u32, F32, exponents 8, fraction 23;
    bf16, u16, Bf16, exponents 8, fraction 7;
    f16, u16, F16, exponents 5, fraction 10;
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

/// The value nearest to the sum over `divisor`, found by bisection: all comparisons are of integers.
fn nearest<T: Float>(operands: &[T], divisor: i64) -> u32 {
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

/// Checks all levels, in and out of place, in vectors and behind them. `rows`: operands by element.
fn check<T: Float>(rows: &[Vec<T>]) {
    let ranks = rows[0].len();
    let columns: Vec<Vec<T>> = (0..ranks).map(|rank| rows.iter().map(|row| row[rank]).collect()).collect();
    let sources: Vec<*const u8> = columns.iter().map(|column| column.as_ptr().cast()).collect();
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let divisor = if op == ReduceOp::Avg { ranks as i64 } else { 1 };
        let wanted: Vec<u32> = rows.iter().map(|row| nearest(row, divisor)).collect();
        let same = |got: &[T], how: &str| {
            for (i, (got, want)) in got.iter().zip(&wanted).enumerate() {
                assert_eq!(got.bits(), *want, "{how}: {op} of {:?} ({got:?}, expected {:?})", rows[i], T::of(*want));
            }
        };
        for level in Level::ALL.into_iter().filter(|&level| level <= Level::detect()) {
            let exact = Exact::at(level, T::DTYPE, Some(op), ranks).unwrap();
            let mut out = columns[0].clone();
            // SAFETY: all have as many elements as there are rows.
            unsafe { exact.sum(&sources, out.as_mut_ptr().cast(), rows.len()) };
            same(&out, level.name());
            let mut first = columns[0].clone();
            let place = first.as_mut_ptr().cast::<u8>();
            let in_place: Vec<_> = [place.cast_const()].into_iter().chain(sources[1..].iter().copied()).collect();
            // SAFETY: as above.
            unsafe { exact.sum(&in_place, place, rows.len()) };
            same(&first, "in place");
        }
        if ranks == 2 {
            let kernels = Combination::new(T::DTYPE, Some(op), 2, true).kernels;
            let (mut out, mut copy) = (columns[0].clone(), columns[0].clone());
            // SAFETY: as above.
            unsafe { (kernels.reduce)(sources[0], sources[1], out.as_mut_ptr().cast(), rows.len()) };
            same(&out, "two");
            let (to, second) = (out.as_mut_ptr().cast(), copy.as_mut_ptr().cast());
            // SAFETY: as above.
            unsafe { (kernels.reduce_dual)(sources[0], sources[1], to, second, rows.len()) };
            same(&out, "two, twice");
            same(&copy, "two, the copy");
        }
    }
}

/// Operands that are hard to add: cancellations, ties and what breaks them, the ends of the range.
fn hard<T: Float>(seed: u64, ranks: usize) -> Vec<T> {
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
            7 if next() % 2 == 0 => if next() % 2 == 0 { T::SIGN } else { 0 },
            _ => finite,
        };
        operands.push(T::of(bits));
    }
    operands
}

fn every_kind<T: Float>(seed: u64, ranks: usize, elements: usize) {
    let rows: Vec<_> = (0..elements).map(|i| hard(seed.wrapping_add(i as u64) << 20 | seed >> 44, ranks)).collect();
    check::<T>(&rows);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_sum_is_the_exact_one_rounded_once(seed in any::<u64>(), ranks in 1usize..10, elements in 1usize..60) {
        every_kind::<f32>(seed, ranks, elements);
        every_kind::<bf16>(seed, ranks, elements);
        every_kind::<f16>(seed, ranks, elements);
    }

    #[test]
    fn any_bits(columns in proptest::collection::vec(proptest::collection::vec(any::<u32>(), 3), 1..40)) {
        fn rows<T: Float>(columns: &[Vec<u32>]) -> Vec<Vec<T>> {
            columns.iter().map(|row| row.iter().map(|&bits| T::of(bits & (T::SIGN | (T::SIGN - 1)))).collect()).collect()
        }
        check::<f32>(&rows(&columns));
        check::<bf16>(&rows(&columns));
        check::<f16>(&rows(&columns));
    }
}

#[test]
fn sums_of_many_operands() {
    for ranks in [31, 64, 65, 300] {
        every_kind::<f32>(7, ranks, 40);
        every_kind::<bf16>(8, ranks, 40);
        every_kind::<f16>(9, ranks, 40);
    }
    // More f16 than an f64 is known to hold the sum of.
    every_kind::<f16>(10, 5000, 17);
}

/// Two f16 have 2^32 sums; these are all of those with a few second operands, ties and specials among them.
#[test]
fn every_f16_and_bf16_with_some() {
    for other in [0u32, 1, 0x3c00, 0x3c01, 0x7bff, 0x7c00, 0x7e01, 0x8000, 0x8001, 0xbc01, 0xfbff, 0x0400] {
        let bits = (0..1u32 << 16).step_by(7);
        check::<f16>(&bits.clone().map(|x| vec![f16::of(x), f16::of(other)]).collect::<Vec<_>>());
        check::<bf16>(&bits.map(|x| vec![bf16::of(x), bf16::of(other)]).collect::<Vec<_>>());
    }
}

#[test]
fn the_reference_knows_what_is_known() {
    assert_eq!(nearest(&[1.0f32, 1e-30, -1.0], 1), 1e-30f32.to_bits());
    assert_eq!(nearest(&[f32::MAX, f32::MAX, -f32::MAX], 1), f32::MAX.to_bits());
    assert_eq!(nearest(&[f32::MAX, f32::MAX], 1), f32::INFINITY.to_bits());
    assert_eq!(nearest(&[f32::MAX, f32::MAX], 2), f32::MAX.to_bits());
    // A tie goes to the even one, and what breaks it decides.
    let ulp = f32::EPSILON;
    assert_eq!(nearest(&[1.0, ulp / 2.0], 1), 1f32.to_bits());
    assert_eq!(nearest(&[1.0, ulp / 2.0, 1e-40], 1), (1.0 + ulp).to_bits());
    assert_eq!(nearest(&[1.0 + ulp, ulp / 2.0], 1), (1.0 + 2.0 * ulp).to_bits());
    assert_eq!(nearest(&[1.0 + ulp, ulp / 2.0, -1e-40], 1), (1.0 + ulp).to_bits());
    assert_eq!(nearest(&[-0.0f32, -0.0], 1), 1 << 31);
    assert_eq!(nearest(&[-0.0f32, 0.0], 1), 0);
    assert_eq!(nearest(&[1.0f32, 0.0, 0.0], 3), (1.0f32 / 3.0).to_bits());
    assert_eq!(nearest(&[f32::INFINITY, f32::NEG_INFINITY], 1), f32::NAN.to_bits());
    assert_eq!(nearest(&[f16::from_f32(65504.0), f16::from_f32(15.99)], 1), 0x7bff);
    assert_eq!(nearest(&[f16::from_f32(65504.0), f16::from_f32(16.0)], 1), 0x7c00);
    assert!(covers(DType::F32, Some(ReduceOp::Avg)) && !covers(DType::F64, Some(ReduceOp::Sum)));
    assert!(!covers(DType::F32, Some(ReduceOp::Max)) && !covers(DType::F32, None));
}
