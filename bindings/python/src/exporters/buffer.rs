//! The buffer protocol.

use std::ffi::CStr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use tinynccl::DType;

use crate::memory::{Device, Keep, Kind, Memory, View};

pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let py = object.py();
    let mut view = Box::new(ffi::Py_buffer::new());
    let flags = ffi::PyBUF_FORMAT | ffi::PyBUF_STRIDES;
    // SAFETY: a fresh structure to fill; attached.
    if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let view = View(view);
    let raw = &*view.0;
    // SAFETY: filled just now.
    if unsafe { ffi::PyBuffer_IsContiguous(raw, b'C' as _) } == 0 {
        return Err(PyTypeError::new_err(format!(
            "an array of strides {} is not contiguous in memory: pass numpy.ascontiguousarray(array) and copy the result back",
            object.getattr("strides").map_or_else(|_| "?".to_owned(), |s| s.to_string())
        )));
    }
    // SAFETY: NULL or a C string that lives as long as the view.
    let format = if raw.format.is_null() { c"B" } else { unsafe { CStr::from_ptr(raw.format) } };
    let item = usize::try_from(raw.itemsize).unwrap_or(0);
    let kind = kind_of(format.to_bytes(), item).ok_or_else(|| {
        let format = format.to_string_lossy();
        PyTypeError::new_err(format!("elements of format {format:?}, expected numbers in this machine's byte order"))
    })?;
    let count = usize::try_from(raw.len).unwrap_or(0).checked_div(item).unwrap_or(0);
    let (at, writable) = (raw.buf as usize, raw.readonly == 0);
    Ok(Memory { at, count, kind, device: Device::Host, writable, stream: None, _keep: Keep::View(view) })
}

/// A format of the `struct` module, of one element.
fn kind_of(format: &[u8], item: usize) -> Option<Kind> {
    let (order, code) = match format {
        [order @ (b'@' | b'=' | b'<' | b'>' | b'!'), code @ ..] => (*order, code),
        code => (b'@', code),
    };
    if matches!(order, b'>' | b'!') && item > 1 {
        return None;
    }
    let signed = |size| match size {
        1 => Some(DType::I8),
        2 => Some(DType::I16),
        4 => Some(DType::I32),
        8 => Some(DType::I64),
        _ => None,
    };
    let unsigned = |size| match size {
        1 => Some(DType::U8),
        2 => Some(DType::U16),
        4 => Some(DType::U32),
        8 => Some(DType::U64),
        _ => None,
    };
    let number = match code {
        b"f" => Some(DType::F32),
        b"d" => Some(DType::F64),
        b"e" => Some(DType::F16),
        b"?" => return Some(Kind::Bool),
        b"b" | b"h" | b"i" | b"l" | b"q" | b"n" => signed(item),
        b"B" | b"H" | b"I" | b"L" | b"Q" | b"N" => unsigned(item),
        b"c" | b"Zf" | b"Zd" | b"g" => None,
        _ => return None,
    };
    Some(number.map_or(Kind::Opaque(item), Kind::Number))
}
