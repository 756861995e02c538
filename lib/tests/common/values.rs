//! Predictable elements: small integers that every type holds exactly, partial results included, so that equality is
//! exact.

use half::{bf16, f16};
use tinynccl::{DType, Element, F8E4M3, F8E5M2, ReduceOp};

/// Integers as elements; too large ones wrap.
pub trait Number: Element {
    fn of(value: u64) -> Self;
}
macro_rules! numbers {
    ($($t:ty),*) => {$(impl Number for $t { fn of(value: u64) -> Self { value as $t } })*};
}
numbers!(f32, f64, i8, u8, i32, u32, i64, u64, i16, u16);
impl Number for f16 {
    fn of(value: u64) -> Self {
        f16::from_f32(value as f32)
    }
}
impl Number for bf16 {
    fn of(value: u64) -> Self {
        bf16::from_f32(value as f32)
    }
}

impl Number for F8E4M3 {
    fn of(value: u64) -> Self {
        F8E4M3::from_f32(value as f32)
    }
}
impl Number for F8E5M2 {
    fn of(value: u64) -> Self {
        F8E5M2::from_f32(value as f32)
    }
}

/// Runs `$body` with `$t` as the Rust type of `$dtype`.
macro_rules! with_dtype {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            tinynccl::DType::F32 => {
                type $t = f32;
                $body
            }
            tinynccl::DType::F64 => {
                type $t = f64;
                $body
            }
            tinynccl::DType::F16 => {
                type $t = half::f16;
                $body
            }
            tinynccl::DType::Bf16 => {
                type $t = half::bf16;
                $body
            }
            tinynccl::DType::I8 => {
                type $t = i8;
                $body
            }
            tinynccl::DType::U8 => {
                type $t = u8;
                $body
            }
            tinynccl::DType::I32 => {
                type $t = i32;
                $body
            }
            tinynccl::DType::U32 => {
                type $t = u32;
                $body
            }
            tinynccl::DType::I64 => {
                type $t = i64;
                $body
            }
            tinynccl::DType::U64 => {
                type $t = u64;
                $body
            }
            tinynccl::DType::I16 => {
                type $t = i16;
                $body
            }
            tinynccl::DType::U16 => {
                type $t = u16;
                $body
            }
            tinynccl::DType::F8E4M3 => {
                type $t = tinynccl::F8E4M3;
                $body
            }
            tinynccl::DType::F8E5M2 => {
                type $t = tinynccl::F8E5M2;
                $body
            }
        }
    };
}
pub(crate) use with_dtype;

/// Element `i` that `rank` of `ranks` puts into a reduction.
///
/// Sums are below 128 for up to 9 ranks and divisible by the number of ranks; products are a power of two, or three
/// times one. Both are exact in every float, at every step; integers wrap. 8-bit floats hold whole numbers up to 8
/// alone.
pub fn operand(dtype: DType, op: ReduceOp, ranks: usize, rank: usize, i: usize) -> u64 {
    let turn = (rank + i + i / 7) % ranks;
    let value = match op {
        ReduceOp::Prod if rank == 0 => [1, 3][(i / 3) % 2],
        ReduceOp::Prod => 1 + usize::from((rank + i + i / 7).is_multiple_of(3)),
        ReduceOp::Sum if dtype.is_float() && dtype.size() == 1 => [3 - i % 3, 2, 1].get(turn).copied().unwrap_or(0),
        // The sum is the number of ranks, or with more than 8 ranks nothing.
        ReduceOp::Avg if dtype.is_float() && dtype.size() == 1 => match ranks {
            9.. => 0,
            even if even.is_multiple_of(2) => 2 * (turn % 2),
            _ => 1,
        },
        _ => 1 + (3 * i + i / 7 + i / 251) % 6 + 2 * ((rank + i) % ranks),
    };
    value as u64
}

/// The reduction of all ranks' operands.
pub fn reduced(dtype: DType, op: ReduceOp, ranks: usize, i: usize) -> u64 {
    combined(dtype, op, ranks, ranks, i)
}

/// The reduction of the operands of the first `first` of `ranks` ranks.
pub fn combined(dtype: DType, op: ReduceOp, ranks: usize, first: usize, i: usize) -> u64 {
    let values = (0..first).map(|rank| operand(dtype, op, ranks, rank, i));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Avg => values.sum::<u64>() / ranks as u64,
        ReduceOp::Prod => values.product(),
        ReduceOp::Min => values.min().unwrap_or(0),
        ReduceOp::Max => values.max().unwrap_or(0),
        ReduceOp::BitAnd => values.fold(u64::MAX, |a, b| a & b),
        ReduceOp::BitOr => values.fold(0, |a, b| a | b),
        ReduceOp::BitXor => values.fold(0, |a, b| a ^ b),
    }
}

/// Element `i` of what `rank` sends where nothing is combined.
pub fn datum(rank: usize, i: usize) -> u64 {
    ((rank * 31 + i * 7 + i / 13 + i / 1009) % 120) as u64
}

/// What buffers hold before a call; no operand, datum or result.
pub const UNTOUCHED: u64 = 127;

/// A buffer that nothing was received into yet.
pub fn blank<T: Number>(len: usize) -> Vec<T> {
    vec![T::of(UNTOUCHED); len]
}

/// `len` elements by index.
pub fn vector<T: Number>(len: usize, f: impl Fn(usize) -> u64) -> Vec<T> {
    (0..len).map(|i| T::of(f(i))).collect()
}

/// Elements that span several messages of `message` bytes in every algorithm among `ranks`, and a few more.
pub fn several_messages(dtype: DType, ranks: usize, message: usize) -> usize {
    2 * ranks * message / dtype.size() + 5
}
