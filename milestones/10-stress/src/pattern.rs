//! Values whose collective result is known exactly, in every element type.
//!
//! All values are whole numbers, so small that the type holds them, every partial result and the final result without
//! rounding. (An average of floats rounds every product with 1/n; two equal ones are not zero, so that their sum is
//! exact.) So exactly one result is right, in whatever order an algorithm combines them. The values depend on rank, index
//! and seed, so data from the wrong rank or the wrong place is found. They repeat after [`PERIOD`] elements, a
//! prime: no power-of-two shift maps the pattern onto itself.

use half::{bf16, f16};
use tinynccl::{Element, F8E4M3, F8E5M2, ReduceOp};

/// Length of the table of values after which they repeat.
pub(crate) const PERIOD: usize = 4093;

/// An element type that can be made from whole numbers.
pub(crate) trait Number: Element {
    /// The type holds every whole number up to this magnitude exactly.
    const EXACT: i64;
    /// True if the type holds negative numbers.
    const SIGNED: bool;
    /// The number; exact up to [`Number::EXACT`].
    fn from_i64(value: i64) -> Self;
    /// Summand of an average over `ranks` ranks: floats times 1/`ranks`, rounded to the type; integers as they are.
    fn scaled(self, ranks: usize) -> Self;
}

fn unchanged<T>(x: T, _ranks: usize) -> T {
    x
}

/// For floats that are computed in f32.
macro_rules! small {
    ($t:ident) => {
        |x: $t, n: usize| $t::from_f32(x.to_f32() * $t::from_f32(1.0 / n as f32).to_f32())
    };
}

macro_rules! numbers {
    ($($t:ty, $exact:expr, $signed:literal, |$v:ident| $make:expr, $scaled:expr;)*) => {$(
        impl Number for $t {
            const EXACT: i64 = $exact;
            const SIGNED: bool = $signed;
            fn from_i64($v: i64) -> Self { $make }
            fn scaled(self, ranks: usize) -> Self { ($scaled)(self, ranks) }
        }
    )*};
}
numbers! {
    f32, 1 << 24, true, |v| v as f32, |x: f32, n: usize| x * (1.0 / n as f32);
    f64, 1 << 53, true, |v| v as f64, |x: f64, n: usize| x * (1.0 / n as f64);
    f16, 1 << 11, true, |v| f16::from_f32(v as f32), small!(f16);
    bf16, 1 << 8, true, |v| bf16::from_f32(v as f32), small!(bf16);
    i8, 127, true, |v| v as i8, unchanged;
    u8, 255, false, |v| v as u8, unchanged;
    i32, (1 << 31) - 1, true, |v| v as i32, unchanged;
    u32, (1 << 32) - 1, false, |v| v as u32, unchanged;
    i64, 1 << 61, true, |v| v, unchanged;
    u64, 1 << 61, false, |v| v as u64, unchanged;
    i16, (1 << 15) - 1, true, |v| v as i16, unchanged;
    u16, (1 << 16) - 1, false, |v| v as u16, unchanged;
    F8E4M3, 1 << 4, true, |v| F8E4M3::from_f32(v as f32), small!(F8E4M3);
    F8E5M2, 1 << 3, true, |v| F8E5M2::from_f32(v as f32), small!(F8E5M2);
}

/// Runs `$body` with `$T` standing for the Rust type of a `DType`.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::pattern::with_type!($dtype, $T => $body,
            F32 f32, F64 f64, F16 half::f16, Bf16 half::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64,
            I16 i16, U16 u16, F8E4M3 tinynccl::F8E4M3, F8E5M2 tinynccl::F8E5M2)
    };
    ($dtype:expr, $T:ident => $body:expr, $($name:ident $type:ty),*) => {
        match $dtype {
            $(tinynccl::DType::$name => {
                type $T = $type;
                $body
            })*
        }
    };
}
pub(crate) use with_type;

/// The inputs of all ranks for one operator (`None`: data is only moved).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pattern {
    op: Option<ReduceOp>,
    ranks: usize,
    exact: i64,
    signed: bool,
    float: bool,
    seed: u64,
}

impl Pattern {
    /// For elements of type `T`.
    pub(crate) fn new<T: Number>(op: Option<ReduceOp>, ranks: usize, seed: u64) -> Pattern {
        Pattern { op, ranks, exact: T::EXACT, signed: T::SIGNED, float: T::DTYPE.is_float(), seed }
    }

    /// Input of `rank` at `index`.
    pub(crate) fn input(&self, rank: usize, index: usize) -> i64 {
        let (n, index) = (self.ranks as i64, index % PERIOD);
        let own = self.hash(rank, index);
        let common = self.hash(usize::MAX, index);
        let turn = ((rank + index) % self.ranks) as i64;
        match self.op {
            None | Some(ReduceOp::Min | ReduceOp::Max) => self.whole(own, self.exact),
            // With random bits of many ranks, an AND would clear all bits and an OR set all: so few ranks clear or set
            // any.
            Some(ReduceOp::BitAnd) => {
                let whole = below(common, self.exact);
                if turn < 2 { whole & below(own, self.exact) } else { whole }
            }
            Some(ReduceOp::BitOr) if turn >= 2 => 0,
            Some(ReduceOp::BitOr | ReduceOp::BitXor) => below(own, self.exact),
            // n values of magnitude up to exact / n; with more than `exact` ranks, only some are not zero.
            Some(ReduceOp::Sum) => {
                if turn < self.exact {
                    self.whole(own, (self.exact / n).max(1))
                } else {
                    0
                }
            }
            // `common` is the number of ranks that hold 2; all others hold 1. Each rank has its own signs.
            Some(ReduceOp::Prod) => {
                let most = n.min(i64::from(self.exact.ilog2()));
                let magnitude = if turn < below(common, most) { 2 } else { 1 };
                if self.signed && own & 1 == 1 { -magnitude } else { magnitude }
            }
            // Two ranks have the same value, the others none.
            Some(ReduceOp::Avg) if self.float => {
                let other = 1 + (common >> 32) as i64 % (n - 1).max(1);
                if turn == 0 || turn == other { self.whole(common, self.exact / 2) } else { 0 }
            }
            // Neighbours differ from the average by the same amount, up and down: the sum is n x average.
            Some(ReduceOp::Avg) => {
                let average = below(common, self.exact / n);
                let swing = below(common >> 32, average);
                let value = match rank {
                    last if last + 1 == self.ranks && last % 2 == 0 => average,
                    even if even % 2 == 0 => average + swing,
                    _ => average - swing,
                };
                if self.signed && common & 1 == 1 { -value } else { value }
            }
        }
    }

    /// The reduction over all ranks at `index`; of an average of floats the sum, which is still to be scaled.
    pub(crate) fn reduced(&self, index: usize) -> i64 {
        self.reduced_of(self.ranks, index)
    }

    /// The reduction over the first `ranks` ranks at `index`.
    fn reduced_of(&self, ranks: usize, index: usize) -> i64 {
        let inputs = (0..ranks).map(|rank| self.input(rank, index));
        match self.op {
            None => 0,
            Some(ReduceOp::Sum) => inputs.sum(),
            Some(ReduceOp::Avg) if self.float => inputs.sum(),
            Some(ReduceOp::Prod) => inputs.product(),
            Some(ReduceOp::Min) => inputs.min().unwrap_or(0),
            Some(ReduceOp::Max) => inputs.max().unwrap_or(0),
            Some(ReduceOp::Avg) => inputs.sum::<i64>() / self.ranks as i64,
            Some(ReduceOp::BitAnd) => inputs.fold(-1, |a, b| a & b),
            Some(ReduceOp::BitOr) => inputs.fold(0, |a, b| a | b),
            Some(ReduceOp::BitXor) => inputs.fold(0, |a, b| a ^ b),
        }
    }

    fn hash(&self, rank: usize, index: usize) -> u64 {
        mix(mix(self.seed ^ (rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)) ^ index as u64)
    }

    /// A number of magnitude up to `limit`, negative ones included where the type has them.
    fn whole(&self, hash: u64, limit: i64) -> i64 {
        if self.signed { below(hash, 2 * limit) - limit } else { below(hash, limit) }
    }
}

/// 0 to `limit`, both included.
fn below(hash: u64, limit: i64) -> i64 {
    (hash % (limit.max(0) as u64 + 1)) as i64
}

/// The finaliser of splitmix64.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The pattern in the element type: every rank's input, and the result of a reduction.
#[derive(Debug)]
pub(crate) struct Tables<T> {
    inputs: Vec<Vec<T>>,
    reduced: Vec<T>,
    /// By rank: the reduction of the ranks up to it.
    scanned: Vec<Vec<T>>,
}

/// The source of the values in a range of memory; the index is that of its first element in the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The input of this rank, from this index on.
    Input(usize, usize),
    /// The reduction, from this index on.
    Reduced(usize),
    /// The reduction of the ranks up to this one.
    Scanned(usize),
    /// The call must not write here.
    Untouched,
}

impl<T: Number> Tables<T> {
    pub(crate) fn new(pattern: &Pattern) -> Tables<T> {
        let table = |value: &dyn Fn(usize) -> i64| (0..PERIOD).map(|i| T::from_i64(value(i))).collect();
        // Twice a rounded product is the rounded product of twice as much.
        let scale = |sums: Vec<T>| match pattern.op {
            Some(ReduceOp::Avg) if pattern.ranks > 1 => sums.into_iter().map(|x| x.scaled(pattern.ranks)).collect(),
            _ => sums,
        };
        Tables {
            inputs: (0..pattern.ranks).map(|rank| table(&|i| pattern.input(rank, i))).collect(),
            reduced: scale(table(&|i| pattern.reduced(i))),
            scanned: (1..=pattern.ranks).map(|ranks| table(&|i| pattern.reduced_of(ranks, i))).collect(),
        }
    }

    /// The table that holds a source's values, and the index of its first value.
    fn find(&self, source: Source) -> (&[T], usize) {
        match source {
            Source::Input(rank, start) => (self.inputs.get(rank).map_or(&[], Vec::as_slice), start % PERIOD),
            Source::Reduced(start) => (&self.reduced, start % PERIOD),
            Source::Scanned(rank) => (self.scanned.get(rank).map_or(&[], Vec::as_slice), 0),
            Source::Untouched => (&[], 0),
        }
    }

    /// Writes the source's values.
    pub(crate) fn fill(&self, memory: &mut [T], source: Source) {
        let (table, mut at) = self.find(source);
        let mut rest = memory;
        while !rest.is_empty() {
            let Some(values) = table.get(at..).filter(|v| !v.is_empty()) else {
                return rest.fill(poison());
            };
            let (now, later) = rest.split_at_mut(values.len().min(rest.len()));
            now.copy_from_slice(&values[..now.len()]);
            (rest, at) = (later, 0);
        }
    }

    /// The number of elements that differ from the source's values, and the first of them: index and expected value.
    pub(crate) fn wrong(&self, memory: &[T], source: Source) -> (usize, Option<(usize, T)>) {
        let (table, mut at) = self.find(source);
        let poisoned;
        let table = if table.is_empty() {
            poisoned = vec![poison(); PERIOD];
            &poisoned[..]
        } else {
            table
        };
        let (mut wrong, mut first, mut done) = (0, None, 0);
        while done < memory.len() {
            let take = (PERIOD - at).min(memory.len() - done);
            let (got, expected) = (&memory[done..done + take], &table[at..at + take]);
            // Compare all bytes at once first: nearly always everything is right.
            if bytemuck::cast_slice::<T, u8>(got) != bytemuck::cast_slice::<T, u8>(expected) {
                for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                    if !same(g, e) {
                        wrong += 1;
                        first.get_or_insert((done + i, *e));
                    }
                }
            }
            done += take;
            at = 0;
        }
        (wrong, first)
    }
}

/// Equal as numbers (0 equals -0) or as bytes (untouched memory may hold NaN).
fn same<T: Number>(a: &T, b: &T) -> bool {
    a == b || bytemuck::bytes_of(a) == bytemuck::bytes_of(b)
}

/// The contents of memory before a call: a value that no result has by chance, except in one-byte types.
pub(crate) fn poison<T: Number>() -> T {
    let mut value = T::from_i64(0);
    bytemuck::bytes_of_mut(&mut value).fill(0x7d);
    value
}

#[cfg(test)]
#[path = "pattern_tests.rs"]
mod tests;
