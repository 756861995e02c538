//! Errors of the library as exceptions of `tinynccl.errors`, and the interpreter's signals as the end of a wait.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tinynccl::{Error, Result};

thread_local! {
    /// The exception that a signal's handler raised while a call waited.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Runs `call` without the interpreter's lock. A signal whose handler raises (Ctrl-C) ends its waits.
pub(crate) fn waiting<R: Send>(py: Python<'_>, call: impl FnOnce() -> Result<R> + Send) -> PyResult<R> {
    let outcome = py.detach(|| tinynccl::interrupt::watched(handler_raised, call));
    match (outcome, RAISED.take()) {
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(raise(py, &error)),
    }
}

fn handler_raised() -> bool {
    Python::attach(|py| match py.check_signals() {
        Ok(()) => false,
        Err(raised) => {
            RAISED.set(Some(raised));
            true
        }
    })
}

/// The exception for an error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).unwrap_or_else(|broken| broken)
}

/// An `InvalidArgument`.
pub(crate) fn invalid(py: Python<'_>, op: &str, detail: String) -> PyErr {
    raise(py, &Error::invalid(op, detail))
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("tinynccl.errors").map(Bound::unbind))?.bind(py);
    let name = match error {
        Error::Mismatch { .. } => "Mismatch",
        Error::PeerLost { .. } => "PeerLost",
        Error::Timeout { .. } => "Timeout",
        Error::Aborted { .. } => "Aborted",
        Error::InvalidArgument { .. } => "InvalidArgument",
        Error::Config { .. } => "ConfigError",
        Error::Bootstrap { .. } => "BootstrapError",
        Error::Protocol { .. } => "ProtocolError",
        Error::Os { .. } => "SystemFailure",
        Error::Cuda { .. } => "CudaError",
        Error::Unsupported { .. } => "Unsupported",
        _ => "Error",
    };
    let exception = module.getattr(name)?.call1((error.to_string(),))?;
    match error {
        Error::Mismatch { rank, peer, .. } => {
            exception.setattr("rank", rank)?;
            exception.setattr("peer", peer)?;
        }
        Error::PeerLost { op, rank, peer, .. } | Error::Protocol { op, rank, peer, .. } => {
            exception.setattr("op", op)?;
            exception.setattr("rank", rank)?;
            exception.setattr("peer", peer)?;
        }
        Error::Timeout { op, rank, missing, .. } => {
            exception.setattr("op", op)?;
            exception.setattr("rank", rank)?;
            exception.setattr("missing", missing.clone())?;
        }
        Error::Aborted { op, rank, .. } => {
            exception.setattr("op", op)?;
            exception.setattr("rank", rank)?;
        }
        Error::InvalidArgument { op, .. } | Error::Os { op, .. } | Error::Cuda { op, .. } => {
            exception.setattr("op", op)?;
        }
        _ => {}
    }
    Ok(PyErr::from_value(exception))
}
