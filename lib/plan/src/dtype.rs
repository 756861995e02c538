//! Element types and reduction operators, as data and as a trait.

use std::fmt;

use half::{bf16, f16};

use crate::float8::{F8E4M3, F8E5M2};

/// Type of the elements of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// bfloat16: the upper half of an `f32`.
    Bf16 = 3,
    /// Signed 8-bit integer.
    I8 = 4,
    /// Unsigned 8-bit integer.
    U8 = 5,
    /// Signed 32-bit integer.
    I32 = 6,
    /// Unsigned 32-bit integer.
    U32 = 7,
    /// Signed 64-bit integer.
    I64 = 8,
    /// Unsigned 64-bit integer.
    U64 = 9,
    /// Signed 16-bit integer.
    I16 = 10,
    /// Unsigned 16-bit integer.
    U16 = 11,
    /// 8-bit float with 4 bits of exponent, without infinities: [`F8E4M3`].
    F8E4M3 = 12,
    /// 8-bit float with 5 bits of exponent: [`F8E5M2`].
    F8E5M2 = 13,
}

impl DType {
    /// Every element type, in code order.
    pub const ALL: [DType; 14] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::I8,
        DType::U8,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
        DType::I16,
        DType::U16,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// Size of one element in bytes.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// Short lower-case name: `f32`, `bf16`, ….
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::U64 => "u64",
            DType::I16 => "i16",
            DType::U16 => "u16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
        }
    }

    /// The type with this wire code.
    #[inline]
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.get(code as usize).copied()
    }

    /// True for the floating-point types.
    #[inline]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        DType::ALL
            .into_iter()
            .find(|d| d.name() == s)
            .ok_or_else(|| format!("unknown dtype '{s}', expected one of {}", DType::ALL.map(DType::name).join(" ")))
    }
}

/// Operator that combines the ranks' values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum = 0,
    /// Product; integers wrap.
    Prod = 1,
    /// Minimum; NaN if any value is NaN.
    Min = 2,
    /// Maximum; NaN if any value is NaN.
    Max = 3,
    /// Average over the ranks, as NCCL defines it. Floats: each rank's value times 1/n (the factor and the product
    /// rounded to the type), then the sum, so that large values do not overflow. Integers: the sum, which wraps, over
    /// n, towards zero.
    Avg = 4,
    /// Bitwise and; integers only, like the next two.
    BitAnd = 5,
    /// Bitwise or.
    BitOr = 6,
    /// Bitwise exclusive or.
    BitXor = 7,
}

impl ReduceOp {
    /// Every operator, in code order.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// Short lower-case name.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Avg => "avg",
            ReduceOp::BitAnd => "band",
            ReduceOp::BitOr => "bor",
            ReduceOp::BitXor => "bxor",
        }
    }

    /// True for the operators on bits.
    #[inline]
    pub const fn is_bitwise(self) -> bool {
        matches!(self, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor)
    }

    /// Returns true if the operator can combine values of `dtype`: operators on bits take integers only.
    #[inline]
    pub const fn applies_to(self, dtype: DType) -> bool {
        !(self.is_bitwise() && dtype.is_float())
    }

    /// The operator with this wire code.
    #[inline]
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.get(code as usize).copied()
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for ReduceOp {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        ReduceOp::ALL.into_iter().find(|o| o.name() == s).ok_or_else(|| {
            format!("unknown operator '{s}', expected one of {}", ReduceOp::ALL.map(ReduceOp::name).join(" "))
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a collective can carry. Sealed: the set is the set of [`DType`]s.
pub trait Element: sealed::Sealed + bytemuck::Pod + Send + Sync + PartialEq + fmt::Debug {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t { const DTYPE: DType = DType::$d; }
    )*};
}
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
    i16 => I16, u16 => U16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for (i, d) in DType::ALL.into_iter().enumerate() {
            assert_eq!(d as usize, i);
            assert_eq!(DType::from_code(i as u8), Some(d));
            assert_eq!(d.name().parse(), Ok(d));
        }
        for (i, o) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(o as usize, i);
            assert_eq!(ReduceOp::from_code(i as u8), Some(o));
            assert_eq!(o.name().parse(), Ok(o));
        }
        assert_eq!(DType::from_code(14), None);
        assert!("f31".parse::<DType>().is_err());
    }

    #[test]
    fn sizes_match_the_rust_types() {
        fn check<T: Element>() {
            assert_eq!(T::DTYPE.size(), size_of::<T>());
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();
        check::<bf16>();
        check::<i8>();
        check::<u8>();
        check::<i32>();
        check::<u32>();
        check::<i64>();
        check::<u64>();
        check::<i16>();
        check::<u16>();
        check::<F8E4M3>();
        check::<F8E5M2>();
    }
}
