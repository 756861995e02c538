//! Element types and operators: NCCL's numbers, and the library's types.

use std::ffi::c_int;

use tinynccl::{DType, ReduceOp};

use super::error::{Error, Result};
use super::types::NUM_OPS;

/// The element types, at the index of their `ncclDataType_t`.
pub const TYPES: [DType; 12] = [
    DType::I8,
    DType::U8,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::Bf16,
    DType::F8E4M3,
    DType::F8E5M2,
];

/// The operators, at the index of their `ncclRedOp_t`.
pub const OPERATORS: [ReduceOp; NUM_OPS as usize] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];

/// Returns the element type of an `ncclDataType_t`.
pub(crate) fn dtype(value: c_int) -> Result<DType> {
    let found = usize::try_from(value).ok().and_then(|value| TYPES.get(value));
    found.copied().ok_or_else(|| Error::argument(format!("datatype is {value}, expected 0 to {}", TYPES.len() - 1)))
}

/// Returns the operator of an `ncclRedOp_t` below [`NUM_OPS`].
pub(crate) fn operator(value: c_int) -> Option<ReduceOp> {
    usize::try_from(value).ok().and_then(|value| OPERATORS.get(value)).copied()
}
