//! One collective on all ranks, element by element.

use cudarc::driver::{CudaSlice, DevicePtr};
use half::{bf16, f16};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{Choice, Path, Protocol};
use tinynccl::wire::Collective;
use tinynccl::{Call, Element, F8E4M3, F8E5M2, ReduceOp};

use super::Rank;

/// Elements whose reductions are exact: small whole numbers. (Averages of floats too, of 2, 4 or 8 ranks.)
pub(super) trait Exact: Element {
    fn of(value: i64) -> Self;
    /// Floats: products with 1/n, each rounded to the type, as is their sum. Integers: the sum, which wraps, over n.
    fn average(values: impl Iterator<Item = Self>, n: usize) -> Self;
}
/// `$down` rounds to the type.
macro_rules! floats {
    ($($t:ty: $wide:ty, $down:expr, $up:expr;)*) => {$(
        impl Exact for $t {
            fn of(value: i64) -> Self { ($down)(value as $wide) }
            fn average(values: impl Iterator<Item = Self>, n: usize) -> Self {
                let (down, up): (fn($wide) -> $t, fn($t) -> $wide) = ($down, $up);
                let factor = up(down(1.0 / n as $wide));
                down(values.map(|x| up(down(up(x) * factor))).reduce(|a, b| a + b).unwrap())
            }
        }
    )*};
}
floats! {
    f32: f32, |v| v, |x| x;
    f64: f64, |v| v, |x| x;
    f16: f32, f16::from_f32, f16::to_f32;
    bf16: f32, bf16::from_f32, bf16::to_f32;
    F8E4M3: f32, F8E4M3::from_f32, F8E4M3::to_f32;
    F8E5M2: f32, F8E5M2::from_f32, F8E5M2::to_f32;
}
macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Exact for $t {
            fn of(value: i64) -> Self { value as $t }
            fn average(values: impl Iterator<Item = Self>, n: usize) -> Self {
                (i128::from(values.fold(0, <$t>::wrapping_add)) / n as i128) as $t
            }
        }
    )*};
}
integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// Element `i` of rank `rank`'s input: 1 or 2, so that products of 8 ranks fit every type.
pub(super) fn value(rank: usize, i: usize) -> i64 {
    1 + ((i * 7 + rank * 3 + i / 5 + (i * rank) / 3) % 2) as i64
}

pub(super) fn reduced<T: Exact>(op: ReduceOp, n: usize, i: usize) -> T {
    let values = (0..n).map(|rank| value(rank, i));
    match op {
        ReduceOp::Sum => T::of(values.sum()),
        ReduceOp::Prod => T::of(values.product()),
        ReduceOp::Min => T::of(values.min().unwrap()),
        ReduceOp::Max => T::of(values.max().unwrap()),
        ReduceOp::Avg => T::average(values.map(T::of), n),
        ReduceOp::BitAnd => T::of(values.fold(-1, |a, b| a & b)),
        ReduceOp::BitOr => T::of(values.fold(0, |a, b| a | b)),
        ReduceOp::BitXor => T::of(values.fold(0, |a, b| a ^ b)),
    }
}

/// Guard elements around an output.
pub(super) const GUARD: usize = 37;

/// Runs one collective on all ranks from this thread and checks every element, and those around the output.
pub(super) fn check<T: Exact>(
    ranks: &[Rank],
    collective: Collective,
    op: ReduceOp,
    count: usize,
    shift: usize,
    choice: Choice,
    in_place: bool,
) {
    let n = ranks.len();
    let call = Call::new(collective, T::DTYPE, op, count % n, count);
    check_values(ranks, call, shift, choice, in_place, |rank, i| T::of(value(rank, i)), |i| reduced::<T>(op, n, i));
}

/// [`check`] of the call with these inputs by rank and element, and this reduction of all of them.
pub(super) fn check_values<T: Exact>(
    ranks: &[Rank],
    call: Call,
    shift: usize,
    choice: Choice,
    in_place: bool,
    value: impl Fn(usize, usize) -> T,
    reduced: impl Fn(usize) -> T,
) {
    let n = ranks.len();
    let Call { collective, op, count, root, .. } = call;
    let (in_len, out_len) = match collective {
        Collective::AllGather => (count, n * count),
        Collective::ReduceScatter => (n * count, count),
        Collective::AllToAll => (n * count, n * count),
        _ => (count, count),
    };
    // As bytes: cudarc does not know the 8-bit floats.
    let mut memory: Vec<(CudaSlice<u8>, CudaSlice<u8>)> = Vec::new();
    for (rank, r) in ranks.iter().enumerate() {
        let mut input = vec![T::of(9); shift];
        input.extend((0..in_len).map(|i| value(rank, i)));
        let mut output = vec![T::of(5); out_len + 2 * GUARD + shift];
        if in_place {
            output[GUARD + shift..][..in_len].copy_from_slice(&input[shift..]);
        }
        let copy = |values: &[T]| r.stream.clone_htod(bytemuck::cast_slice::<T, u8>(values)).unwrap();
        memory.push((copy(&input), copy(&output)));
    }
    for (r, (input, output)) in ranks.iter().zip(&memory) {
        let size = size_of::<T>() as u64;
        let to = output.device_ptr(&r.stream).0 + (GUARD + shift) as u64 * size;
        let from = if in_place { to } else { input.device_ptr(&r.stream).0 + shift as u64 * size };
        let call = RawCall::on_device(call, from, to);
        // SAFETY: the buffers have the lengths of the collective and live until the streams are waited for.
        unsafe { r.comm.enqueue_as(&r.stream, &call, choice) }.unwrap();
    }
    let what = |rank: usize| {
        format!(
            "{collective} of {count} {}, {op:?}, {choice:?}, shift {shift}, in place {in_place}, rank {rank}",
            T::DTYPE
        )
    };
    for (rank, (r, (_, output))) in ranks.iter().zip(&memory).enumerate() {
        r.comm.synchronize().unwrap_or_else(|e| panic!("{}: {e}", what(rank)));
        let got = r.stream.clone_dtoh(output).unwrap();
        let got: Vec<T> = got.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        let (before, rest) = got.split_at(GUARD + shift);
        let (got, behind) = rest.split_at(out_len);
        assert!(before.iter().chain(behind).all(|&x| x == T::of(5)), "{}: wrote beside its output", what(rank));
        for (i, &got) in got.iter().enumerate() {
            let expected = match collective {
                Collective::AllReduce => reduced(i),
                Collective::ReduceScatter => reduced(rank * count + i),
                Collective::Reduce if rank == root => reduced(i),
                Collective::Reduce if in_place => value(rank, i),
                Collective::Reduce => T::of(5),
                Collective::Broadcast => value(root, i),
                Collective::AllGather => value(i / count, i % count),
                _ => value(i / count, rank * count + i % count),
            };
            assert_eq!(got, expected, "{}, element {i}", what(rank));
        }
    }
}

/// Every choice by which a collective of `bytes` bytes can be executed, with few and with many blocks.
pub(super) fn choices(ranks: &[Rank], collective: Collective, bytes: usize, blocks: &[u32]) -> Vec<Choice> {
    let chosen = ranks[0].comm.choice(collective, bytes);
    let mut all = vec![chosen];
    if ranks[0].comm.path() == Path::Hosted {
        return all;
    }
    for protocol in [Protocol::OneShot, Protocol::TwoShot, Protocol::OneShot128, Protocol::TwoShot128, Protocol::Simple]
    {
        for &blocks in blocks {
            let choice = Choice { protocol, blocks };
            if ranks[0].comm.fits(collective, choice, bytes) {
                all.push(choice);
            }
        }
    }
    all
}
