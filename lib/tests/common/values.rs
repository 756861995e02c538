//! Predictable elements, whose reductions are the same bits in any order, so that equality is exact: small integers that
//! every type holds, partial results included; for averages of floats a few values that are rounded once each.

use half::{bf16, f16};
use tinynccl::{DType, Element, F8E4M3, F8E5M2, ReduceOp};

/// Integers as elements; too large ones wrap.
pub trait Number: Element {
    /// A large value, whose sum over two ranks overflows where there is no more range.
    const LARGE: u64;
    fn of(value: u64) -> Self;
    /// The average over `ranks` ranks, in their order, as NCCL defines it: floats times 1/n, which is rounded to the
    /// type, as are the products and the sums; the sum of integers, which wraps, over n.
    fn average(values: impl Iterator<Item = Self>, ranks: usize) -> Self;
}
macro_rules! integers {
    ($($t:ty),*) => {$(impl Number for $t {
        const LARGE: u64 = <$t>::MAX as u64;
        fn of(value: u64) -> Self { value as $t }
        fn average(values: impl Iterator<Item = Self>, ranks: usize) -> Self {
            (i128::from(values.fold(0, <$t>::wrapping_add)) / ranks as i128) as $t
        }
    })*};
}
integers!(i8, u8, i32, u32, i64, u64, i16, u16);
/// `$down` rounds to the type, `$up` is exact.
macro_rules! floats {
    ($($t:ty: $wide:ty, $large:expr, $down:expr, $up:expr;)*) => {$(impl Number for $t {
        const LARGE: u64 = $large;
        fn of(value: u64) -> Self { ($down)(value as $wide) }
        fn average(values: impl Iterator<Item = Self>, ranks: usize) -> Self {
            let (down, up): (fn($wide) -> $t, fn($t) -> $wide) = ($down, $up);
            let factor = up(down(1.0 / ranks as $wide));
            let products = values.map(|x| if ranks == 1 { x } else { down(up(x) * factor) });
            products.reduce(|a, b| down(up(a) + up(b))).expect("a rank")
        }
    })*};
}
floats! {
    f32: f32, 1 << 63, |x| x, |x| x;
    f64: f64, 1 << 63, |x| x, |x| x;
    f16: f32, 60_000, f16::from_f32, f16::to_f32;
    bf16: f32, 1 << 63, bf16::from_f32, bf16::to_f32;
    F8E4M3: f32, 448, F8E4M3::from_f32, F8E4M3::to_f32;
    F8E5M2: f32, 57_344, F8E5M2::from_f32, F8E5M2::to_f32;
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
/// alone. Of an average of floats two ranks' values are not zero: their products are equal, so their sum is exact.
pub fn operand<T: Number>(op: ReduceOp, ranks: usize, rank: usize, i: usize) -> T {
    T::of(number::<T>(op, ranks, rank, i))
}

fn number<T: Number>(op: ReduceOp, ranks: usize, rank: usize, i: usize) -> u64 {
    let turn = (rank + i + i / 7) % ranks;
    let dtype = T::DTYPE;
    let value = match op {
        ReduceOp::Prod if rank == 0 => [1, 3][(i / 3) % 2],
        ReduceOp::Prod => 1 + usize::from((rank + i + i / 7).is_multiple_of(3)),
        ReduceOp::Sum if dtype.is_float() && dtype.size() == 1 => [3 - i % 3, 2, 1].get(turn).copied().unwrap_or(0),
        ReduceOp::Avg if dtype.is_float() && ![0, 1 + i / 3 % (ranks - 1).max(1)].contains(&turn) => 0,
        ReduceOp::Avg if dtype.is_float() && i % 5 == 4 => return T::LARGE,
        ReduceOp::Avg if dtype.is_float() => 1 + (3 * i + i / 7) % 6,
        _ => 1 + (3 * i + i / 7 + i / 251) % 6 + 2 * ((rank + i) % ranks),
    };
    value as u64
}

/// The reduction of all ranks' operands.
pub fn reduced<T: Number>(op: ReduceOp, ranks: usize, i: usize) -> T {
    combined(op, ranks, ranks, i)
}

/// The reduction of the operands of the first `first` of `ranks` ranks.
pub fn combined<T: Number>(op: ReduceOp, ranks: usize, first: usize, i: usize) -> T {
    let values = (0..first).map(|rank| number::<T>(op, ranks, rank, i));
    T::of(match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Avg => return T::average(values.map(T::of), ranks),
        ReduceOp::Prod => values.product(),
        ReduceOp::Min => values.min().unwrap_or(0),
        ReduceOp::Max => values.max().unwrap_or(0),
        ReduceOp::BitAnd => values.fold(u64::MAX, |a, b| a & b),
        ReduceOp::BitOr => values.fold(0, |a, b| a | b),
        ReduceOp::BitXor => values.fold(0, |a, b| a ^ b),
    })
}

/// Element `i` of what `rank` sends where nothing is combined.
pub fn datum<T: Number>(rank: usize, i: usize) -> T {
    T::of(((rank * 31 + i * 7 + i / 13 + i / 1009) % 120) as u64)
}

/// Value of all elements of buffers before a call; no operand, datum or result.
pub const UNTOUCHED: u64 = 127;

/// A buffer that nothing was received into yet.
pub fn blank<T: Number>(len: usize) -> Vec<T> {
    vec![T::of(UNTOUCHED); len]
}

/// `len` elements by index.
pub fn vector<T: Number>(len: usize, f: impl Fn(usize) -> T) -> Vec<T> {
    (0..len).map(f).collect()
}

/// Elements that span several messages of `message` bytes in every algorithm among `ranks`, and a few more.
pub fn several_messages(dtype: DType, ranks: usize, message: usize) -> usize {
    2 * ranks * message / dtype.size() + 5
}
