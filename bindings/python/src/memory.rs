//! Where an object's elements lie: torch tensors, the buffer protocol (numpy), `__cuda_array_interface__`, DLPack. No copies.

use std::ffi::{CStr, c_void};
use std::fmt;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use tinynccl::DType;

use crate::torch;

/// Which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Host,
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Host => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What the elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Number(DType),
    /// One byte, 0 or 1.
    Bool,
    /// Of so many bytes; can be moved, not reduced.
    Opaque(usize),
}

impl Kind {
    pub(crate) fn size(self) -> usize {
        match self {
            Kind::Number(dtype) => dtype.size(),
            Kind::Bool => 1,
            Kind::Opaque(bytes) => bytes,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Number(dtype) => dtype.fmt(f),
            Kind::Bool => f.write_str("bool"),
            Kind::Opaque(bytes) => write!(f, "a type of {bytes} bytes that cannot be reduced"),
        }
    }
}

/// Memory of an object that is kept alive with it.
pub(crate) struct Memory {
    pub(crate) at: usize,
    pub(crate) count: usize,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) writable: bool,
    /// The stream that the object's owner named.
    pub(crate) stream: Option<u64>,
    pub(crate) _keep: Keep,
}

/// What keeps it alive, and at its place.
pub(crate) enum Keep {
    Object(#[expect(dead_code, reason = "held")] Py<PyAny>),
    View(#[expect(dead_code, reason = "held")] View),
    /// A DLPack capsule; its destructor gives the tensor back.
    Capsule(#[expect(dead_code, reason = "held")] Py<PyCapsule>),
}

/// An export of the buffer protocol, until dropped.
pub(crate) struct View(Box<ffi::Py_buffer>);

// SAFETY: the structure is the interpreter's word that the memory stays; it is only touched again to release it, attached.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // At the very end of the interpreter there is nobody to give it back to.
        // SAFETY: filled by PyObject_GetBuffer, released once, attached.
        let _ = Python::try_attach(|_| unsafe { ffi::PyBuffer_Release(&raw mut *self.0) });
    }
}

/// The memory of an object.
pub(crate) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if let Some(memory) = torch::memory(object)? {
        return Ok(memory);
    }
    // SAFETY: asks for a slot of the object's type.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
        return from_buffer(object);
    }
    let py = object.py();
    if let Ok(interface) = object.getattr(intern!(py, "__cuda_array_interface__")) {
        return from_cuda_interface(object, &interface);
    }
    if let Ok(export) = object.getattr(intern!(py, "__dlpack__")) {
        return from_dlpack(&export.call0()?);
    }
    Err(PyTypeError::new_err(format!(
        "{} has no memory that can be reached: expected a torch tensor, a numpy array, or an object with the buffer protocol, \
         __cuda_array_interface__ or __dlpack__",
        object.get_type().name()?
    )))
}

fn from_buffer(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
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
        4 => Some(DType::I32),
        8 => Some(DType::I64),
        _ => None,
    };
    let unsigned = |size| match size {
        1 => Some(DType::U8),
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

/// Version 3 of the interface (Numba's documentation): `data`, `shape`, `typestr`, `strides`, `stream`.
fn from_cuda_interface(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Memory> {
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
        ("i", 4) => Kind::Number(DType::I32),
        ("i", 8) => Kind::Number(DType::I64),
        ("u", 1) => Kind::Number(DType::U8),
        ("u", 4) => Kind::Number(DType::U32),
        ("u", 8) => Kind::Number(DType::U64),
        ("b", 1) => Kind::Bool,
        ("i" | "u" | "c" | "f", size) => Kind::Opaque(size),
        _ => return None,
    })
}

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
fn from_dlpack(capsule: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let capsule = capsule.cast::<PyCapsule>()?;
    // SAFETY: a capsule by its type; the name that DLPack says.
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
        (0, 32, 1) => Kind::Number(DType::I32),
        (0, 64, 1) => Kind::Number(DType::I64),
        (1, 8, 1) => Kind::Number(DType::U8),
        (1, 32, 1) => Kind::Number(DType::U32),
        (1, 64, 1) => Kind::Number(DType::U64),
        (2, 16, 1) => Kind::Number(DType::F16),
        (2, 32, 1) => Kind::Number(DType::F32),
        (2, 64, 1) => Kind::Number(DType::F64),
        (4, 16, 1) => Kind::Number(DType::Bf16),
        (6, 8, 1) => Kind::Bool,
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

/// `object` in words, for errors about what it is not.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    if object.is_none() {
        return "None".to_owned();
    }
    object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}
