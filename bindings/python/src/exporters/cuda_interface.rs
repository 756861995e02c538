//! `__cuda_array_interface__`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tinynccl::DType;

use crate::memory::{Device, Keep, Kind, Memory};

/// Version 3 of the interface (Numba's documentation): `data`, `shape`, `typestr`, `strides`, `stream`.
pub(super) fn memory(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let interface = interface.cast::<PyDict>()?;
    let missing = |key: &str| PyTypeError::new_err(format!("__cuda_array_interface__ has no {key:?}"));
    let item = |key: &str| interface.get_item(key)?.ok_or_else(|| missing(key));
    let (at, read_only): (usize, bool) = item("data")?.extract()?;
    let shape: Vec<usize> = item("shape")?.extract()?;
    let typestr: String = item("typestr")?.extract()?;
    let strides = interface.get_item("strides")?.filter(|s| !s.is_none());
    let kind = typestr_kind(&typestr).ok_or_else(|| {
        PyTypeError::new_err(format!("elements of type {typestr:?}, expected numbers in this machine's byte order"))
    })?;
    if let Some(strides) = strides {
        let strides: Vec<isize> = strides.extract()?;
        let mut next = kind.size() as isize;
        for (&length, &stride) in shape.iter().zip(&strides).rev() {
            if length > 1 && stride != next {
                return Err(PyTypeError::new_err(format!(
                    "an array of strides {strides:?} is not contiguous in memory"
                )));
            }
            next *= length as isize;
        }
    }
    let stream = match interface.get_item("stream")?.filter(|s| !s.is_none()) {
        // The legacy default stream has the handle 0 for the driver, too; 2 is the one per thread.
        Some(stream) => Some(match stream.extract::<u64>()? {
            1 => 0,
            other => other,
        }),
        None => None,
    };
    let ordinal = match object.getattr("device") {
        Ok(device) => device
            .extract::<usize>()
            .or_else(|_| device.getattr("id")?.extract())
            .or_else(|_: PyErr| device.getattr("index")?.extract())
            .unwrap_or(0),
        Err(_) => 0,
    };
    Ok(Memory {
        at,
        count: shape.iter().product(),
        kind,
        device: Device::Cuda(ordinal),
        writable: !read_only,
        stream,
        _keep: Keep::Object(object.clone().unbind()),
    })
}

fn typestr_kind(typestr: &str) -> Option<Kind> {
    let (order, rest) = typestr.split_at_checked(1)?;
    let (letter, size) = rest.split_at_checked(1)?;
    let size: usize = size.parse().ok()?;
    if order == ">" && size > 1 {
        return None;
    }
    Some(match (letter, size) {
        ("f", 4) => Kind::Number(DType::F32),
        ("f", 8) => Kind::Number(DType::F64),
        ("f", 2) => Kind::Number(DType::F16),
        ("i", 1) => Kind::Number(DType::I8),
        ("i", 2) => Kind::Number(DType::I16),
        ("i", 4) => Kind::Number(DType::I32),
        ("i", 8) => Kind::Number(DType::I64),
        ("u", 1) => Kind::Number(DType::U8),
        ("u", 2) => Kind::Number(DType::U16),
        ("u", 4) => Kind::Number(DType::U32),
        ("u", 8) => Kind::Number(DType::U64),
        ("b", 1) => Kind::Bool,
        ("i" | "u" | "c" | "f", size) => Kind::Opaque(size),
        _ => return None,
    })
}
