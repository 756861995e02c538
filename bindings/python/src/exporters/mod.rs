//! The memory of objects that expose it, without copies: torch tensors, the buffer protocol (numpy),
//! `__cuda_array_interface__`, DLPack.

mod buffer;
mod cuda_interface;
mod dlpack;
pub(crate) mod torch;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use crate::memory::Memory;

/// The memory of an object.
pub(crate) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if let Some(memory) = torch::memory(object)? {
        return Ok(memory);
    }
    // SAFETY: reads a slot of the object's type.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
        return buffer::memory(object);
    }
    let py = object.py();
    if let Ok(interface) = object.getattr(intern!(py, "__cuda_array_interface__")) {
        return cuda_interface::memory(object, &interface);
    }
    if let Ok(export) = object.getattr(intern!(py, "__dlpack__")) {
        return dlpack::memory(&export.call0()?);
    }
    Err(PyTypeError::new_err(format!(
        "{} has no memory that can be reached: expected a torch tensor, a numpy array, or an object with the buffer protocol, \
         __cuda_array_interface__ or __dlpack__",
        object.get_type().name()?
    )))
}

/// The type of `object`, for errors about an unexpected type.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    if object.is_none() {
        return "None".to_owned();
    }
    object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}
