//! Random values: this library's results beside MPI's own.

use tinynccl::process_group::ProcessGroup;
use tinynccl::{DType, ReduceOp, Result};

use super::common::values::with_dtype;
use super::place::Datum;

/// Whole numbers whose reductions do not overflow (Open MPI's vector code saturates 8-bit sums, ours wrap), and
/// moderate floats.
trait Random: Datum {
    fn random(bits: u64, op: ReduceOp) -> Self;
    /// Equal up to rounding in another order.
    fn close(self, other: Self, ranks: usize) -> bool;
}
macro_rules! integers {
    ($($t:ty),*) => {$(impl Random for $t {
        fn random(bits: u64, op: ReduceOp) -> Self {
            match op {
                ReduceOp::Prod => (bits % 3) as $t,
                ReduceOp::Sum | ReduceOp::Avg => bits as $t / 8,
                _ => bits as $t,
            }
        }
        fn close(self, other: Self, _ranks: usize) -> bool { self == other }
    })*};
}
integers!(i8, u8, i32, u32, i64, u64, i16, u16);
macro_rules! floats {
    ($($t:ty: $from:expr, $to:expr, $epsilon:expr;)*) => {$(impl Random for $t {
        fn random(bits: u64, _op: ReduceOp) -> Self { $from((bits % 4001) as f64 / 1000.0 - 2.0) }
        fn close(self, other: Self, ranks: usize) -> bool {
            let (a, b): (f64, f64) = ($to(self), $to(other));
            let relative = ranks as f64 * $epsilon;
            approx::relative_eq!(a, b, epsilon = 2.0 * relative * ranks as f64, max_relative = relative)
        }
    })*};
}
floats! {
    f32: |v| v as f32, f64::from, f64::from(f32::EPSILON);
    f64: |v| v, |v| v, f64::EPSILON;
    half::f16: half::f16::from_f64, half::f16::to_f64, half::f16::EPSILON.to_f64();
    half::bf16: half::bf16::from_f64, half::bf16::to_f64, half::bf16::EPSILON.to_f64();
    tinynccl::F8E4M3: |v| tinynccl::F8E4M3::from_f32(v as f32), |v: tinynccl::F8E4M3| v.to_f32().into(), 0.125;
    tinynccl::F8E5M2: |v| tinynccl::F8E5M2::from_f32(v as f32), |v: tinynccl::F8E5M2| v.to_f32().into(), 0.25;
}

/// xorshift64.
struct Bits(u64);
impl Bits {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Every collective, type and operator by both groups of the same ranks: what only moves, and all integers and
/// extremes, bit by bit.
pub(crate) fn compare(ours: &ProcessGroup, theirs: &ProcessGroup) -> Result<()> {
    assert_eq!((ours.rank(), ours.size()), (theirs.rank(), theirs.size()));
    for dtype in DType::ALL {
        with_dtype!(dtype, T => compare_as::<T>(ours, theirs)?);
    }
    Ok(())
}

/// A collective from one segment, or from one per rank, into one per rank.
type Named<T> = (&'static str, fn(&ProcessGroup, &[T], &[T], &mut [T]) -> Result<()>);

fn compare_as<T: Random>(ours: &ProcessGroup, theirs: &ProcessGroup) -> Result<()> {
    let (rank, n) = (ours.rank(), ours.size());
    let mut bits = Bits(0x9e37_79b9_7f4a_7c15 ^ (rank as u64 + 1) << 32 ^ T::DTYPE as u64);
    let count = 1009;
    let mut random = |len: usize, op| -> Vec<T> { (0..len).map(|_| T::random(bits.next(), op)).collect() };
    let zero = |len: usize| vec![T::of(0); len];
    let same = |what: &str, op: Option<ReduceOp>, a: &[T], b: &[T]| {
        let exact = matches!(op, None | Some(ReduceOp::Min | ReduceOp::Max));
        let differs = |i: &usize| if exact { a[*i] != b[*i] } else { !a[*i].close(b[*i], n) };
        if let Some(i) = (0..a.len()).find(differs) {
            let (op, dtype) = (op.map_or("", ReduceOp::name), T::DTYPE);
            panic!("{what} {op} of {dtype}: rank {rank} of {n}: element {i} is {:?} by ours, {:?} by MPI", a[i], b[i]);
        }
    };
    for op in ReduceOp::ALL.into_iter().filter(|op| op.applies_to(T::DTYPE)) {
        let (short, long) = (random(count, op), random(n * count, op));
        let (mut a, mut b) = (short.clone(), short.clone());
        ours.all_reduce_in_place(&mut a, op)?;
        theirs.all_reduce_in_place(&mut b, op)?;
        same("all_reduce", Some(op), &a, &b);
        let (mut a, mut b) = (short.clone(), short);
        ours.reduce_in_place(&mut a, op, n / 2)?;
        theirs.reduce_in_place(&mut b, op, n / 2)?;
        same("reduce", Some(op), &a, &b);
        let (mut a, mut b) = (zero(count), zero(count));
        ours.reduce_scatter(&long, &mut a, op)?;
        theirs.reduce_scatter(&long, &mut b, op)?;
        same("reduce_scatter", Some(op), &a, &b);
    }
    let (short, long) = (random(count, ReduceOp::Max), random(n * count, ReduceOp::Max));
    let (mut a, mut b) = (short.clone(), short.clone());
    ours.broadcast_in_place(&mut a, n - 1)?;
    theirs.broadcast_in_place(&mut b, n - 1)?;
    same("broadcast", None, &a, &b);
    let calls: [Named<T>; 4] = [
        ("all_gather", |group, short, _, to| group.all_gather(short, to)),
        ("gather", |group, short, _, to| group.gather(short, to, 0)),
        ("scatter", |group, _, long, to| group.scatter(long, &mut to[..1009], 0)),
        ("all_to_all", |group, _, long, to| group.all_to_all(long, to)),
    ];
    for (what, call) in calls {
        let (mut a, mut b) = (zero(n * count), zero(n * count));
        call(ours, &short, &long, &mut a)?;
        call(theirs, &short, &long, &mut b)?;
        same(what, None, &a, &b);
    }
    Ok(())
}
