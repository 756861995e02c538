//! DLPack's capsules.

use std::ffi::c_void;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use tinynccl::DType;

use crate::memory::{Device, Keep, Kind, Memory};

/// `DLTensor` of DLPack 0.x and 1.x, without versions.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const DL_CPU: i32 = 1;
const DL_CUDA: i32 = 2;
const DL_CUDA_HOST: i32 = 3;

/// The capsule keeps its name: we only look, and its own destructor gives the tensor back when we drop it.
pub(super) fn memory(capsule: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let capsule = capsule.cast::<PyCapsule>()?;
    // SAFETY: a capsule by its type; the name that DLPack defines.
    let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dltensor".as_ptr()) }.cast::<DlTensor>();
    if tensor.is_null() {
        return Err(PyErr::fetch(capsule.py()));
    }
    // SAFETY: DLManagedTensor begins with its DLTensor, which lives as long as the capsule is not consumed.
    let tensor = unsafe { &*tensor };
    let dims = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |at: *const i64| match at.is_null() || dims == 0 {
        true => Vec::new(),
        // SAFETY: `ndim` numbers, by the format.
        false => unsafe { std::slice::from_raw_parts(at, dims) }.to_vec(),
    };
    let (shape, strides) = (list(tensor.shape), list(tensor.strides));
    let mut next = 1;
    for (&length, &stride) in shape.iter().zip(&strides).rev() {
        if length > 1 && stride != next {
            return Err(PyBufferError::new_err(format!("a tensor of strides {strides:?} is not contiguous in memory")));
        }
        next *= length;
    }
    let bytes = usize::from(tensor.bits) * usize::from(tensor.lanes) / 8;
    let kind = match (tensor.code, tensor.bits, tensor.lanes) {
        (0, 8, 1) => Kind::Number(DType::I8),
        (0, 16, 1) => Kind::Number(DType::I16),
        (0, 32, 1) => Kind::Number(DType::I32),
        (0, 64, 1) => Kind::Number(DType::I64),
        (1, 8, 1) => Kind::Number(DType::U8),
        (1, 16, 1) => Kind::Number(DType::U16),
        (1, 32, 1) => Kind::Number(DType::U32),
        (1, 64, 1) => Kind::Number(DType::U64),
        (2, 16, 1) => Kind::Number(DType::F16),
        (2, 32, 1) => Kind::Number(DType::F32),
        (2, 64, 1) => Kind::Number(DType::F64),
        (4, 16, 1) => Kind::Number(DType::Bf16),
        (6, 8, 1) => Kind::Bool,
        (10, 8, 1) => Kind::Number(DType::F8E4M3),
        (12, 8, 1) => Kind::Number(DType::F8E5M2),
        _ => Kind::Opaque(bytes.max(1)),
    };
    let device = match tensor.device_type {
        DL_CPU | DL_CUDA_HOST => Device::Host,
        DL_CUDA => Device::Cuda(usize::try_from(tensor.device_id).unwrap_or(0)),
        other => return Err(PyBufferError::new_err(format!("DLPack device type {other}, expected the CPU or CUDA"))),
    };
    Ok(Memory {
        at: tensor.data as usize + tensor.byte_offset as usize,
        count: shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).product(),
        kind,
        device,
        writable: true,
        stream: None,
        _keep: Keep::Capsule(capsule.clone().unbind()),
    })
}
