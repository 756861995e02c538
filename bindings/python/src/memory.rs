//! The memory of an object: its address, the type of its elements, and the object that keeps it alive.

use std::fmt;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use tinynccl::DType;

/// The device that memory belongs to.
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

/// The type of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Number(DType),
    /// One byte, 0 or 1.
    Bool,
    /// An element of this many bytes, which can be moved but not reduced.
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

/// The reference that keeps memory alive, at its address.
pub(crate) enum Keep {
    Object(#[expect(dead_code, reason = "held")] Py<PyAny>),
    View(#[expect(dead_code, reason = "held")] View),
    /// A DLPack capsule; its destructor gives the tensor back.
    Capsule(#[expect(dead_code, reason = "held")] Py<PyCapsule>),
}

/// An export of the buffer protocol, until dropped.
pub(crate) struct View(pub(crate) Box<ffi::Py_buffer>);

// SAFETY: the structure keeps the memory alive, by the buffer protocol; it is only touched again to release it,
// attached.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // At the very end of the interpreter there is no one to give it back to.
        // SAFETY: filled by PyObject_GetBuffer, released once, attached.
        let _ = Python::try_attach(|_| unsafe { ffi::PyBuffer_Release(&raw mut *self.0) });
    }
}
