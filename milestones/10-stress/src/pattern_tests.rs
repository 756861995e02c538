use proptest::prelude::*;
use tinynccl::DType;

use super::*;

fn ops(dtype: DType) -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().filter(move |op| op.applies_to(dtype))
}

/// The number that a value of the type stands for; panics if the conversion is not exact.
fn number<T: Number>(value: T) -> f64 {
    let bytes = bytemuck::bytes_of(&value);
    match T::DTYPE {
        DType::F32 => f64::from(bytemuck::pod_read_unaligned::<f32>(bytes)),
        DType::F64 => bytemuck::pod_read_unaligned::<f64>(bytes),
        DType::F16 => bytemuck::pod_read_unaligned::<f16>(bytes).to_f64(),
        DType::Bf16 => bytemuck::pod_read_unaligned::<bf16>(bytes).to_f64(),
        DType::I8 => f64::from(bytemuck::pod_read_unaligned::<i8>(bytes)),
        DType::U8 => f64::from(bytemuck::pod_read_unaligned::<u8>(bytes)),
        DType::I32 => f64::from(bytemuck::pod_read_unaligned::<i32>(bytes)),
        DType::U32 => f64::from(bytemuck::pod_read_unaligned::<u32>(bytes)),
        DType::I64 => bytemuck::pod_read_unaligned::<i64>(bytes) as f64,
        DType::U64 => bytemuck::pod_read_unaligned::<u64>(bytes) as f64,
        DType::I16 => f64::from(bytemuck::pod_read_unaligned::<i16>(bytes)),
        DType::U16 => f64::from(bytemuck::pod_read_unaligned::<u16>(bytes)),
        DType::F8E4M3 => f64::from(bytemuck::pod_read_unaligned::<F8E4M3>(bytes).to_f32()),
        DType::F8E5M2 => f64::from(bytemuck::pod_read_unaligned::<F8E5M2>(bytes).to_f32()),
    }
}

/// Inputs, partial reductions in several orders and the result are whole numbers that the type holds.
fn exact<T: Number>(op: ReduceOp, ranks: usize, seed: u64) {
    let pattern = Pattern::new::<T>(Some(op), ranks, seed);
    for index in [0, 1, 2, 17, 1000, PERIOD - 1] {
        let inputs: Vec<i64> = (0..ranks).map(|r| pattern.input(r, index)).collect();
        let holds = |v: i64| {
            let range = if T::SIGNED { -T::EXACT..=T::EXACT } else { 0..=T::EXACT };
            assert!(range.contains(&v), "{op} over {ranks} ranks of {}: {v} in {inputs:?}", T::DTYPE);
            assert_eq!(number(T::from_i64(v)), v as f64);
        };
        let fold = |a: i64, b: i64| match op {
            ReduceOp::Sum | ReduceOp::Avg => a + b,
            ReduceOp::Prod => a * b,
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::BitAnd => a & b,
            ReduceOp::BitOr => a | b,
            ReduceOp::BitXor => a ^ b,
        };
        inputs.iter().copied().for_each(holds);
        for stride in [1, 2, 3] {
            let order = (0..stride).flat_map(|s| (s..ranks).step_by(stride)).map(|r| inputs[r]);
            order.reduce(|a, b| {
                holds(fold(a, b));
                fold(a, b)
            });
        }
        if op == ReduceOp::Avg && !T::DTYPE.is_float() {
            assert_eq!(inputs.iter().sum::<i64>() % ranks as i64, 0, "{inputs:?}");
        }
        holds(pattern.reduced(index));
    }
}

#[test]
fn no_order_of_combination_rounds_or_overflows() {
    for dtype in DType::ALL {
        for ranks in (1..=9).chain([16, 17, 63, 64, 127, 128, 300]) {
            for op in ops(dtype) {
                with_type!(dtype, T => exact::<T>(op, ranks, 7));
            }
        }
    }
}

#[test]
fn results_tell_ranks_indices_and_operators_apart() {
    for dtype in DType::ALL {
        with_type!(dtype, T => {
            for op in ops(dtype) {
                let pattern = Pattern::new::<T>(Some(op), 4, 1);
                let distinct: std::collections::BTreeSet<i64> = (0..100).map(|i| pattern.reduced(i)).collect();
                assert!(distinct.len() >= 5, "{op} {dtype}: {distinct:?}");
                let differ = (0..100).filter(|&i| pattern.input(0, i) != pattern.input(1, i)).count();
                assert!(differ >= 30, "{op} {dtype}: ranks 0 and 1 differ in {differ} of 100 values");
                // An omitted rank must be found: here the first rank's input replaces the last one's.
                let missing = (0..PERIOD).any(|i| pattern.input(3, i) != pattern.input(0, i));
                assert!(missing, "{op} {dtype}");
            }
        });
    }
    let f = |op| Pattern::new::<f32>(Some(op), 3, 1);
    assert!((0..10).any(|i| f(ReduceOp::Min).reduced(i) != f(ReduceOp::Max).reduced(i)));
}

/// The products with 1/n, added in any order.
#[test]
fn an_average_of_floats_is_the_sum_of_scaled_inputs() {
    fn check<T: Number>(add: impl Fn(T, T) -> T) {
        for ranks in [2, 3, 5, 7, 16, 300] {
            let pattern = Pattern::new::<T>(Some(ReduceOp::Avg), ranks, 3);
            let tables = Tables::<T>::new(&pattern);
            for i in 0..200 {
                let scaled = (0..ranks).map(|rank| T::from_i64(pattern.input(rank, i)).scaled(ranks));
                let want = scaled.reduce(&add).unwrap();
                assert!(number(tables.reduced[i]) == number(want), "{}, {ranks} ranks, {i}", T::DTYPE);
            }
        }
    }
    check::<f32>(|a, b| a + b);
    check::<f64>(|a, b| a + b);
    check::<f16>(|a, b| f16::from_f32(a.to_f32() + b.to_f32()));
    check::<bf16>(|a, b| bf16::from_f32(a.to_f32() + b.to_f32()));
    check::<F8E4M3>(|a, b| F8E4M3::from_f32(a.to_f32() + b.to_f32()));
    check::<F8E5M2>(|a, b| F8E5M2::from_f32(a.to_f32() + b.to_f32()));
}

#[test]
fn seeds_give_other_values() {
    let value = |seed| (0..50).map(|i| Pattern::new::<i32>(None, 2, seed).input(0, i)).collect::<Vec<_>>();
    assert_ne!(value(1), value(2));
    assert_eq!(value(1), value(1));
}

#[test]
fn what_is_wrong_is_counted_and_found() {
    let tables = Tables::<f32>::new(&Pattern::new::<f32>(Some(ReduceOp::Sum), 3, 5));
    let mut memory = vec![0.0; 3 * PERIOD + 11];
    for source in [Source::Reduced(77), Source::Input(2, PERIOD + 3), Source::Untouched] {
        tables.fill(&mut memory, source);
        assert_eq!(tables.wrong(&memory, source), (0, None));
        let keep = (memory[5], memory[2 * PERIOD]);
        (memory[5], memory[2 * PERIOD]) = (0.5, f32::NAN);
        let (wrong, first) = tables.wrong(&memory, source);
        assert_eq!(wrong, 2);
        assert_eq!(first.map(|(i, e)| (i, e.to_bits())), Some((5, keep.0.to_bits())));
        (memory[5], memory[2 * PERIOD]) = keep;
    }
    tables.fill(&mut memory, Source::Reduced(0));
    assert!(tables.wrong(&memory, Source::Reduced(1)).0 > memory.len() / 2, "a shift by one element shows");
    assert!(tables.wrong(&memory, Source::Reduced(4096)).0 > memory.len() / 2, "a shift by a chunk shows");
    assert!(tables.wrong(&memory, Source::Untouched).0 == memory.len(), "untouched memory is recognised");
}

#[test]
fn minus_zero_is_zero() {
    let tables = Tables::<f32>::new(&Pattern {
        op: Some(ReduceOp::Sum),
        ranks: 1,
        exact: 0,
        signed: true,
        float: true,
        seed: 0,
    });
    assert_eq!(tables.wrong(&[0.0, -0.0], Source::Reduced(0)), (0, None));
}

proptest! {
    #[test]
    fn any_seed_and_world_stays_exact(op in prop::sample::select(ReduceOp::ALL.to_vec()), ranks in 1usize..200, seed: u64) {
        for dtype in DType::ALL.into_iter().filter(|&dtype| op.applies_to(dtype)) {
            with_type!(dtype, T => exact::<T>(op, ranks, seed));
        }
    }
}
