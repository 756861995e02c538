//! Averages at both ends of every type's range, on every path of the host's memory, beside their definition: floats
//! times 1/n before the sum, the sum of integers over n.

use tinynccl::config::SingleCopy;
use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::process_group::ProcessGroup;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, DType, F8E4M3, F8E5M2, ReduceOp, Result};

use crate::common::memory::Memory;
use crate::common::values::{Number, with_dtype};
use crate::common::{FABRICS, Fabric, config, run_ok};
use half::{bf16, f16};

/// Elements that show an overflow, a lost subnormal, a double rounding or a wrong sign.
trait Edge: Number {
    fn edges() -> [Self; 12];
    fn negated(self) -> Self;
    /// Its bits; the same for every NaN.
    fn bits(self) -> u64;
}
macro_rules! edges {
    (integers $($t:ty)*) => {$(impl Edge for $t {
        fn edges() -> [Self; 12] {
            [<$t>::MAX, <$t>::MIN, <$t>::MAX - 1, <$t>::MIN + 1, 0, 1, 2, 3, 7, 100, <$t>::MAX / 2, <$t>::MAX / 3]
        }
        fn negated(self) -> Self { self.wrapping_neg() }
        fn bits(self) -> u64 { self as u64 }
    })*};
    (floats $($t:ty: $bits:ty, greatest $greatest:expr, least normal $normal:expr;)*) => {$(impl Edge for $t {
        fn edges() -> [Self; 12] {
            // The least subnormal, the greatest one and its neighbours, numbers near one, the greatest finite ones.
            let (most, normal): ($bits, $bits) = ($greatest, $normal);
            let bits = [0, 1, 2, 3, normal - 1, normal, normal + 1, most / 2, most / 2 + 1, most / 3, most - 1, most];
            bits.map(<$t>::from_bits)
        }
        fn negated(self) -> Self { <$t>::from_bits(self.to_bits() ^ 1 << (<$bits>::BITS - 1)) }
        fn bits(self) -> u64 { if self.is_nan() { u64::MAX } else { self.to_bits().into() } }
    })*};
}
edges!(integers i8 u8 i16 u16 i32 u32 i64 u64);
edges! { floats
    f32: u32, greatest 0x7f7f_ffff, least normal 0x0080_0000;
    f64: u64, greatest 0x7fef_ffff_ffff_ffff, least normal 0x0010_0000_0000_0000;
    f16: u16, greatest 0x7bff, least normal 0x0400;
    bf16: u16, greatest 0x7f7f, least normal 0x0080;
    F8E4M3: u8, greatest 0x7e, least normal 0x08;
    F8E5M2: u8, greatest 0x7b, least normal 0x04;
}

/// Element `i` of `rank`'s input. All ranks' are large at once in the first elements, and each has its turn later.
fn element<T: Edge>(rank: usize, i: usize) -> T {
    let edges = T::edges();
    let (turn, way) = (i % edges.len(), i / edges.len());
    let value = edges[(turn + way % 5 * rank) % edges.len()];
    if (way / 2 + rank * (way % 3)).is_multiple_of(2) { value } else { value.negated() }
}

fn want<T: Edge>(ranks: usize, i: usize) -> u64 {
    T::average((0..ranks).map(|rank| element::<T>(rank, i)), ranks).bits()
}

/// Every call that averages, in every form.
fn check<T: Edge>(comm: &Comm, count: usize, context: &str) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let memory = Memory { comm, most: n * count };
    let own = |i: usize| element::<T>(rank, i);
    let same = |form: &str, at: usize, got: &[T]| {
        for (i, x) in got.iter().enumerate() {
            assert!(
                x.bits() == want::<T>(n, at + i),
                "{context}: {form} of {count} {}: rank {rank} of {n}: element {i} is {x:?}, expected bits {:x}, of {:?}",
                T::DTYPE,
                want::<T>(n, at + i),
                (0..n).map(|rank| element::<T>(rank, at + i)).collect::<Vec<_>>()
            );
        }
    };
    let kept = |form: &str, got: &[T]| {
        assert!(got.iter().enumerate().all(|(i, x)| x.bits() == own(i).bits()), "{context}: {form} changed its input");
    };
    let (mut input, mut output) = (memory.vector::<T>(count, own), memory.blank::<T>(count));
    comm.all_reduce(&input, &mut output, ReduceOp::Avg)?;
    same("all_reduce", 0, &output);
    kept("all_reduce", &input);
    comm.all_reduce_in_place(&mut input, ReduceOp::Avg)?;
    same("all_reduce in place", 0, &input);

    let root = count % n;
    let (mut input, mut output) = (memory.vector::<T>(count, own), memory.blank(if rank == root { count } else { 0 }));
    comm.reduce(&input, &mut output, ReduceOp::Avg, root)?;
    same("reduce", 0, &output);
    kept("reduce", &input);
    comm.reduce_in_place(&mut input, ReduceOp::Avg, root)?;
    if rank == root {
        same("reduce in place", 0, &input);
    } else {
        kept("reduce in place", &input);
    }

    let (mut input, mut output) = (memory.vector::<T>(n * count, own), memory.blank(count));
    comm.reduce_scatter(&input, &mut output, ReduceOp::Avg)?;
    same("reduce_scatter", rank * count, &output);
    kept("reduce_scatter", &input);
    comm.reduce_scatter_in_place(&mut input, ReduceOp::Avg)?;
    same("reduce_scatter in place", rank * count, &input[rank * count..][..count]);

    // Packed, in pieces, and as calls of a group.
    let mut buffer: Vec<T> = (0..count).map(own).collect();
    comm.group(|g| buffer.chunks_mut(17).try_for_each(|piece| g.all_reduce_in_place(piece, ReduceOp::Avg)))?;
    same("all_reduces of a group", 0, &buffer);
    let input: Vec<T> = (0..n * count).map(own).collect();
    let (mut all, mut part) = (vec![T::of(0); count], vec![T::of(0); count]);
    comm.group(|g| {
        g.all_reduce(&input[..count], &mut all, ReduceOp::Avg)?;
        g.reduce_scatter(&input, &mut part, ReduceOp::Avg)
    })?;
    same("all_reduce of a group", 0, &all);
    same("reduce_scatter of a group", rank * count, &part);
    Ok(())
}

fn every_type(comm: &Comm, counts: &[usize], context: &str) -> Result<()> {
    for dtype in DType::ALL {
        for &count in counts {
            with_dtype!(dtype, T => check::<T>(comm, count, context))?;
        }
    }
    Ok(())
}

/// In the order of the ranks, so that every bit is known.
fn fixed(algorithm: Option<Algorithm>) -> Config {
    let mut config = config();
    (config.fixed_order, config.algorithm) = (true, algorithm);
    (config.shm_chunk, config.tcp_chunk) = (4 << 10, 4 << 10);
    config
}

#[test]
fn every_type_on_every_path_has_the_bits_of_the_definition() {
    for fabric in FABRICS {
        // Links carry the same steps over every transport.
        let sizes: &[usize] = if fabric == Fabric::Inproc { &[1, 2, 3, 4, 5, 7] } else { &[2, 3] };
        for &ranks in sizes {
            for algorithm in Algorithm::ALL.map(Some).into_iter().chain([None]) {
                let context = format!("{fabric:?}, {algorithm:?}");
                run_ok(fabric, ranks, &fixed(algorithm), |comm| every_type(&comm, &[1, 211], &context));
            }
        }
    }
}

/// Averages over two ranks: every algorithm has the same order, and messages, windows and chunks are many.
#[test]
fn two_ranks_by_every_algorithm_in_several_messages() {
    for fabric in FABRICS {
        for algorithm in Algorithm::ALL.map(Some).into_iter().chain([None]) {
            let context = format!("{fabric:?}, {algorithm:?}, several messages");
            let mut config = fixed(algorithm);
            (config.fixed_order, config.channels) = (false, 2);
            run_ok(fabric, 2, &config, |comm| every_type(&comm, &[3001], &context));
        }
    }
}

/// Receivers may read the senders' buffers, but not where a sender has to multiply first.
#[test]
fn where_large_messages_go_by_zero_copy() {
    for ranks in [2, 3] {
        for algorithm in Algorithm::ALL.map(Some).into_iter().chain([None]) {
            let mut config = config();
            (config.fixed_order, config.algorithm, config.single_copy) = (true, algorithm, SingleCopy::From(0));
            let context = format!("zero copy, {algorithm:?}");
            run_ok(Fabric::Shm, ranks, &config, |comm| {
                check::<f16>(&comm, 100_003, &context)?;
                check::<f32>(&comm, 50_001, &context)?;
                check::<i32>(&comm, 50_001, &context)
            });
        }
    }
}

/// Outputs that are written around the cache.
#[test]
fn outputs_too_large_for_the_cache() {
    const COUNT: usize = (9 << 20) / 4;
    for (fabric, algorithm) in [
        (Fabric::Inproc, Some(Algorithm::Ring)),
        (Fabric::Tcp, Some(Algorithm::Ring)),
        (Fabric::Shm, Some(Algorithm::Direct)),
        (Fabric::Shm, Some(Algorithm::TwoShot)),
        (Fabric::Shm, Some(Algorithm::Staged)),
    ] {
        let mut config = config();
        config.algorithm = algorithm;
        run_ok(fabric, 2, &config, |comm| {
            let memory = Memory { comm: &comm, most: COUNT };
            let mut buffer = memory.vector::<f32>(COUNT, |i| element(comm.rank(), i));
            let mut output = memory.blank::<f32>(COUNT);
            let edges: Vec<u64> = (0..12 * 60).map(|i| want::<f32>(2, i)).collect();
            let same = |got: &[f32], form: &str| {
                let wrong = got.iter().enumerate().find(|&(i, x)| x.bits() != edges[i % edges.len()]);
                assert_eq!(wrong, None, "{fabric:?}, {algorithm:?}, {form}");
            };
            comm.all_reduce(&buffer, &mut output, ReduceOp::Avg)?;
            same(&output, "all_reduce");
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Avg)?;
            same(&buffer, "all_reduce in place");
            Ok(())
        });
    }
}

/// Averages of values whose sum, if it was divided at its end, would be infinite.
#[test]
fn sums_that_would_overflow() {
    fn check<T: Edge>(comm: &Comm, large: T) -> Result<()> {
        let mut one = [large];
        comm.all_reduce_in_place(&mut one, ReduceOp::Avg)?;
        assert_eq!(one[0], large, "{}", T::DTYPE);
        Ok(())
    }
    for fabric in FABRICS {
        for ranks in [2, 4] {
            run_ok(fabric, ranks, &config(), |comm| {
                check(&comm, f16::from_f32(60_000.0))?;
                check(&comm, bf16::MAX)?;
                check(&comm, f32::MAX)?;
                check(&comm, -f64::MAX)?;
                check(&comm, F8E4M3::from_f32(448.0))?;
                check(&comm, F8E5M2::from_f32(57_344.0))
            });
        }
    }
}

#[test]
fn gradients_near_the_end_of_the_range() {
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        let group = ProcessGroup::from(comm);
        let mut ddp = Ddp::new(&group, &[ParamSpec { name: "weights".to_owned(), len: 3 }], DdpOptions::default())?;
        ddp.zero();
        ddp.gradient_mut(0)?.copy_from_slice(&[f32::MAX, -3e38, 1e-45]);
        ddp.ready(0)?;
        ddp.finish()?;
        assert_eq!(ddp.gradient(0)?, [f32::MAX, -3e38, 0.0]);
        Ok(())
    });
}
