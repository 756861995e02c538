//! MPI's names for our types and operators. MPI has no 16- or 8-bit floats: they are sent as integers of that size,
//! with custom operators that call this library's reductions.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use mpi::ffi;

use tinynccl_comm::reduce;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::Result;

pub(super) fn data_type(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library, set before main.
    unsafe {
        match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::F16 | DType::Bf16 | DType::U16 => ffi::RSMPI_UINT16_T,
            DType::I16 => ffi::RSMPI_INT16_T,
            DType::I8 => ffi::RSMPI_INT8_T,
            DType::U8 | DType::F8E4M3 | DType::F8E5M2 => ffi::RSMPI_UINT8_T,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            DType::U64 => ffi::RSMPI_UINT64_T,
        }
    }
}

/// The operator; an average is a sum, whose ends are the caller's.
pub(super) fn operator(dtype: DType, op: ReduceOp) -> Result<ffi::MPI_Op> {
    if matches!(dtype, DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2) {
        return own_operator(dtype, op);
    }
    // SAFETY: as above.
    Ok(unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => ffi::RSMPI_SUM,
            ReduceOp::Prod => ffi::RSMPI_PROD,
            ReduceOp::Min => ffi::RSMPI_MIN,
            ReduceOp::Max => ffi::RSMPI_MAX,
            ReduceOp::BitAnd => ffi::RSMPI_BAND,
            ReduceOp::BitOr => ffi::RSMPI_BOR,
            ReduceOp::BitXor => ffi::RSMPI_BXOR,
        }
    })
}

/// Custom operators, which live until MPI ends.
struct Own([ffi::MPI_Op; 16]);

// SAFETY: handles, which MPI lets any thread use.
unsafe impl Send for Own {}
// SAFETY: as above.
unsafe impl Sync for Own {}

macro_rules! own_functions {
    ($($name:ident: $dtype:ident $op:ident;)*) => {$(
        unsafe extern "C" fn $name(from: *mut c_void, into: *mut c_void, count: *mut c_int, _type: *mut ffi::MPI_Datatype) {
            // SAFETY: MPI gives two buffers of `count` elements of the type that the call named.
            unsafe {
                let (from, into) = (from.cast::<u8>(), into.cast::<u8>());
                let count = usize::try_from(*count).unwrap_or(0);
                (reduce::kernels(DType::$dtype, ReduceOp::$op).reduce)(from, into, into, count);
            }
        }
    )*};
}
own_functions! {
    f16_sum: F16 Sum;
    f16_prod: F16 Prod;
    f16_min: F16 Min;
    f16_max: F16 Max;
    bf16_sum: Bf16 Sum;
    bf16_prod: Bf16 Prod;
    bf16_min: Bf16 Min;
    bf16_max: Bf16 Max;
    e4m3_sum: F8E4M3 Sum;
    e4m3_prod: F8E4M3 Prod;
    e4m3_min: F8E4M3 Min;
    e4m3_max: F8E4M3 Max;
    e5m2_sum: F8E5M2 Sum;
    e5m2_prod: F8E5M2 Prod;
    e5m2_min: F8E5M2 Min;
    e5m2_max: F8E5M2 Max;
}

fn own_operator(dtype: DType, op: ReduceOp) -> Result<ffi::MPI_Op> {
    static OWN: OnceLock<Result<Own>> = OnceLock::new();
    let own = OWN.get_or_init(|| {
        let functions = [
            f16_sum, f16_prod, f16_min, f16_max, bf16_sum, bf16_prod, bf16_min, bf16_max, //
            e4m3_sum, e4m3_prod, e4m3_min, e4m3_max, e5m2_sum, e5m2_prod, e5m2_min, e5m2_max,
        ]
        .map(|f: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut ffi::MPI_Datatype)| Some(f));
        let mut own = [ffi::MPI_Op(null_mut::<c_void>() as _); 16];
        for (handle, function) in own.iter_mut().zip(functions) {
            // SAFETY: the function has MPI's signature, and is commutative.
            let status = unsafe { ffi::MPI_Op_create(function, 1, handle) };
            super::world::done("an operator of ours", status)?;
        }
        Ok(Own(own))
    });
    let place = match op {
        ReduceOp::Prod => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        // Bits of floats are not combined.
        _ => 0,
    };
    let place = place
        + match dtype {
            DType::Bf16 => 4,
            DType::F8E4M3 => 8,
            DType::F8E5M2 => 12,
            _ => 0,
        };
    own.as_ref().map(|own| own.0[place]).map_err(Clone::clone)
}
