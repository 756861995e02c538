//! Fixed order: a float reduction is `((x0 + x1) + x2) + ...`, whatever carries it.

use crate::common::{FABRICS, Fabric, config, run_ok};
use half::{bf16, f16};
use proptest::prelude::*;
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, DType, Element, ReduceOp, Result};

/// A float with the rounding that `ReduceOp::Sum` and `Avg` promise: after every addition and multiplication, to the
/// element type.
trait Float: Element {
    fn of(x: f64) -> Self;
    fn add(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn bits(self) -> u64;
}
macro_rules! native {
    ($($t:ty),*) => {$(impl Float for $t {
        fn of(x: f64) -> Self { x as $t }
        fn add(self, other: Self) -> Self { self + other }
        fn times(self, other: Self) -> Self { self * other }
        fn bits(self) -> u64 { self.to_bits().into() }
    })*};
}
native!(f32, f64);
macro_rules! sixteen {
    ($($t:ty),*) => {$(impl Float for $t {
        fn of(x: f64) -> Self { <$t>::from_f64(x) }
        fn add(self, other: Self) -> Self { <$t>::from_f32(self.to_f32() + other.to_f32()) }
        fn times(self, other: Self) -> Self { <$t>::from_f32(self.to_f32() * other.to_f32()) }
        fn bits(self) -> u64 { self.to_bits().into() }
    })*};
}
sixteen!(f16, bf16);

/// Numbers of many magnitudes, whose sum depends on the order.
fn values<T: Float>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    (0..len)
        .map(|i| {
            // SplitMix64.
            let mut z = seed.wrapping_add((rank * 1_000_003 + i + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let z = z ^ (z >> 31);
            let mantissa = 1.0 + (z >> 12) as f64 / (1u64 << 52) as f64;
            let sign = if z & 1 == 0 { 1.0 } else { -1.0 };
            T::of(sign * mantissa * 2f64.powi((z >> 1 & 7) as i32 - 4))
        })
        .collect()
}

/// The reduction that is promised.
fn expected<T: Float>(seed: u64, ranks: usize, len: usize, op: ReduceOp) -> Vec<u64> {
    let factor = T::of(if op == ReduceOp::Avg { 1.0 / ranks as f64 } else { 1.0 });
    let terms = |rank| values::<T>(seed, rank, len).into_iter().map(move |x| x.times(factor));
    let mut sum: Vec<T> = terms(0).collect();
    for rank in 1..ranks {
        for (a, b) in sum.iter_mut().zip(terms(rank)) {
            *a = if op == ReduceOp::Prod { a.times(b) } else { a.add(b) };
        }
    }
    sum.into_iter().map(Float::bits).collect()
}

fn bits<T: Float>(data: &[T]) -> Vec<u64> {
    data.iter().map(|x| x.bits()).collect()
}

/// Every way to the same reduction of `n * count` elements.
fn check<T: Float>(comm: &Comm, seed: u64, count: usize, op: ReduceOp) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let want = expected::<T>(seed, n, n * count, op);
    let input: Vec<T> = values(seed, rank, n * count);
    let zero = T::of(0.0);
    let same = |got: &[T], what: &str| assert!(bits(got) == want, "{what}: {count} x {n} {}, {op}", T::DTYPE);

    let mut out = vec![zero; n * count];
    comm.all_reduce(&input, &mut out, op)?;
    same(&out, "all_reduce");
    let mut buffer = input.clone();
    comm.all_reduce_in_place(&mut buffer, op)?;
    same(&buffer, "all_reduce in place");

    let root = count % n;
    let mut buffer = input.clone();
    comm.reduce_in_place(&mut buffer, op, root)?;
    comm.broadcast_in_place(&mut buffer, root)?;
    same(&buffer, "reduce in place, then broadcast");
    let mut out = vec![zero; if rank == root { n * count } else { 0 }];
    comm.reduce(&input, &mut out, op, root)?;
    out.resize(n * count, zero);
    comm.broadcast_in_place(&mut out, root)?;
    same(&out, "reduce, then broadcast");

    let (mut segment, mut out) = (vec![zero; count], vec![zero; n * count]);
    comm.reduce_scatter(&input, &mut segment, op)?;
    comm.all_gather(&segment, &mut out)?;
    same(&out, "reduce_scatter, then all_gather");
    let mut buffer = input.clone();
    comm.reduce_scatter_in_place(&mut buffer, op)?;
    comm.all_gather_in_place(&mut buffer)?;
    same(&buffer, "reduce_scatter in place, then all_gather in place");

    // Packed, in pieces.
    let mut buffer = input;
    comm.group(|g| buffer.chunks_mut(17).try_for_each(|piece| g.all_reduce_in_place(piece, op)))?;
    same(&buffer, "many all_reduces of a group");
    Ok(())
}

fn fixed(algorithm: Option<Algorithm>, message: usize) -> Config {
    let mut config = config();
    (config.fixed_order, config.algorithm) = (true, algorithm);
    (config.shm_chunk, config.tcp_chunk) = (message, message);
    config
}

#[test]
fn bits_depend_neither_on_algorithm_nor_on_transport_message_size_or_place() {
    for fabric in FABRICS {
        for ranks in [2, 3, 5] {
            for algorithm in Algorithm::ALL.map(Some).into_iter().chain([None]) {
                for message in [256, 64 << 10] {
                    run_ok(fabric, ranks, &fixed(algorithm, message), |comm| {
                        for count in [1, 201] {
                            check::<f32>(&comm, 1, count, ReduceOp::Sum)?;
                            check::<f16>(&comm, 3, count, ReduceOp::Avg)?;
                            check::<bf16>(&comm, 4, count, ReduceOp::Sum)?;
                        }
                        check::<f64>(&comm, 2, 57, ReduceOp::Prod)
                    });
                }
            }
        }
    }
}

#[test]
fn without_it_some_algorithm_differs() {
    // Else the test above would prove nothing.
    let mut config = config();
    config.algorithm = Some(Algorithm::Ring);
    let sums = run_ok(Fabric::Inproc, 4, &config, |comm| {
        let mut buffer: Vec<f32> = values(1, comm.rank(), 200);
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        Ok(bits(&buffer))
    });
    assert_ne!(sums[0], expected::<f32>(1, 4, 200, ReduceOp::Sum));
    assert_eq!(sums[0], sums[3]);
}

#[test]
fn an_algorithm_in_another_order_is_refused_and_named() {
    let choices = run_ok(Fabric::Inproc, 4, &fixed(Some(Algorithm::Ring), 4096), |comm| {
        let sum = comm.explain(&Call::new(Collective::AllReduce, DType::U8, ReduceOp::Sum, 0, 1 << 20))?;
        assert!(sum.estimates.iter().all(|e| e.algorithm != Algorithm::Ring));
        let copy = comm.explain(&Call::new(Collective::AllGather, DType::U8, ReduceOp::Sum, 0, 1 << 20))?;
        Ok((sum.algorithm, sum.refused, copy.algorithm, copy.refused))
    });
    assert_eq!(choices[0], (Algorithm::AllPairs, Some(Algorithm::Ring), Algorithm::Ring, None));
    assert!(choices.iter().all(|c| *c == choices[0]));
}

#[test]
fn what_was_asked_for_last_is_what_was_refused() {
    for (configured, later, refused) in [
        (None, Some(Algorithm::Ring), Some(Algorithm::Ring)),
        (Some(Algorithm::Ring), Some(Algorithm::HalvingDoubling), Some(Algorithm::HalvingDoubling)),
        (Some(Algorithm::Ring), None, None),
    ] {
        let found = run_ok(Fabric::Inproc, 4, &fixed(configured, 4096), |comm| {
            comm.set_algorithm(later);
            Ok(comm.explain(&Call::new(Collective::AllReduce, DType::U8, ReduceOp::Sum, 0, 1 << 20))?.refused)
        });
        assert_eq!(found, [refused; 4], "{configured:?}, then {later:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_values_and_sizes(seed in any::<u64>(), ranks in 1usize..8, count in 0usize..150, channels in 1usize..4) {
        let mut config = fixed(None, 128);
        config.channels = channels;
        run_ok(Fabric::Inproc, ranks, &config, |comm| {
            check::<f32>(&comm, seed, count, ReduceOp::Sum)?;
            check::<bf16>(&comm, seed, count, ReduceOp::Avg)
        });
    }
}
