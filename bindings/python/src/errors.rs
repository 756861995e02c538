//! Errors of the library as exceptions of `tinynccl.errors`, and the interpreter's signals as the end of a wait.

use std::cell::Cell;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tinynccl::{Error, Result};

use crate::numbers::renumber;

thread_local! {
    /// The exception that a signal's handler raised while a call waited.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
    /// The call in which this thread waits and holds locks of the library.
    static INSIDE: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// The numbers by which errors name ranks; empty: the communicator's own.
pub(crate) type Names = Arc<[usize]>;

/// Puts the call that this thread was in back.
struct Before(Option<&'static str>);

impl Drop for Before {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

/// Runs `call` without the interpreter's lock. A signal whose handler raises (Ctrl-C) ends its waits.
pub(crate) fn waiting<R: Send>(
    py: Python<'_>,
    op: &'static str,
    names: &Names,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    let outcome = py.detach(|| {
        let _before = Before(INSIDE.replace(Some(op)));
        tinynccl::interrupt::watched(handler_raised, call)
    });
    match (outcome, RAISED.take()) {
        (_, Some(raised)) => Err(raised),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(raise(py, names, &error)),
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

/// An error where a call of this thread waits further up its stack, with locks that another call would need: Python
/// code then runs in a signal's handler, or in a finalizer that it sets off.
pub(crate) fn not_inside(py: Python<'_>, op: &'static str, rank: usize) -> PyResult<()> {
    let Some(outer) = INSIDE.get() else { return Ok(()) };
    let detail = format!(
        "rank {rank}: called by a signal's handler or a finalizer while its thread waits in {outer}, and nothing was sent: \
         make the call after that one, or in another thread"
    );
    Err(invalid(py, op, detail))
}

/// Runs `function` where the call of this thread is over and holds no locks any more.
pub(crate) fn after_call<R>(function: impl FnOnce() -> R) -> R {
    let _before = Before(INSIDE.replace(None));
    function()
}

/// The exception for an error.
pub(crate) fn raise(py: Python<'_>, names: &Names, error: &Error) -> PyErr {
    exception(py, names, error).unwrap_or_else(|broken| broken)
}

/// The exception for an error that has no communicator.
pub(crate) fn raise_plainly(py: Python<'_>, error: &Error) -> PyErr {
    raise(py, &Names::default(), error)
}

/// An `InvalidArgument`.
pub(crate) fn invalid(py: Python<'_>, op: &str, detail: String) -> PyErr {
    raise_plainly(py, &Error::invalid(op, detail))
}

fn exception(py: Python<'_>, names: &Names, error: &Error) -> PyResult<PyErr> {
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
        Error::Corrupt { .. } => "CorruptError",
        Error::Os { .. } => "SystemFailure",
        Error::Cuda { .. } => "CudaError",
        Error::Unsupported { .. } => "Unsupported",
        _ => "Error",
    };
    let exception = module.getattr(name)?.call1((renumber(error.to_string(), names),))?;
    let named = |rank: &usize| names.get(*rank).copied().unwrap_or(*rank);
    match error {
        Error::Mismatch { rank, peer, .. } => {
            exception.setattr("rank", named(rank))?;
            exception.setattr("peer", named(peer))?;
        }
        Error::PeerLost { op, rank, peer, .. } | Error::Protocol { op, rank, peer, .. } => {
            exception.setattr("op", op)?;
            exception.setattr("rank", named(rank))?;
            exception.setattr("peer", named(peer))?;
        }
        Error::Timeout { op, rank, missing, .. } => {
            exception.setattr("op", op)?;
            exception.setattr("rank", named(rank))?;
            exception.setattr("missing", missing.iter().map(named).collect::<Vec<_>>())?;
        }
        Error::Aborted { op, rank, .. } => {
            exception.setattr("op", op)?;
            exception.setattr("rank", named(rank))?;
        }
        Error::InvalidArgument { op, .. } | Error::Os { op, .. } | Error::Cuda { op, .. } => {
            exception.setattr("op", op)?;
        }
        _ => {}
    }
    Ok(PyErr::from_value(exception))
}
