//! Exact sums beside their definition.

use half::{bf16, f16};
use proptest::prelude::*;

use super::exact::{Exact, covers};
use super::{Combination, Level};
use definition::{Float, hard, nearest};
use tinynccl_plan::dtype::{DType, ReduceOp};

#[path = "../../../tests/common/exact.rs"]
#[allow(unreachable_pub, reason = "the library's tests use it, too")]
mod definition;

trait Typed: Float {
    const DTYPE: DType;
}
impl Typed for f32 {
    const DTYPE: DType = DType::F32;
}
impl Typed for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Typed for f16 {
    const DTYPE: DType = DType::F16;
}

/// Checks all levels, in and out of place, in vectors and behind them. `rows`: operands by element.
fn check<T: Typed>(rows: &[Vec<T>]) {
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

fn every_kind<T: Typed>(seed: u64, ranks: usize, elements: usize) {
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
