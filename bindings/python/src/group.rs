//! Several calls as one, and calls collected while a `with comm.group():` is open.

use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::calls::Prepared;
use crate::comm::Comm;
use crate::errors::invalid;
use crate::stream::Stream;

/// Calls of the thread that has a group open.
pub(crate) type Open = Option<(ThreadId, Vec<Prepared>)>;

/// The context manager of `Comm.group`.
#[pyclass(frozen, module = "tinynccl._core")]
pub(crate) struct Group {
    comm: Py<Comm>,
    async_op: bool,
    stream: Option<Stream>,
    work: Mutex<Option<Py<PyAny>>>,
}

impl Group {
    pub(crate) fn new(comm: Py<Comm>, async_op: bool, stream: Option<Stream>) -> Group {
        Group { comm, async_op, stream, work: Mutex::new(None) }
    }
}

#[pymethods]
impl Group {
    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        let comm = slf.get().comm.get();
        let mut open = comm.open_group();
        if open.is_some() {
            drop(open);
            return Err(invalid(py, "group", "a group is open already on this communicator".to_owned()));
        }
        *open = Some((std::thread::current().id(), Vec::new()));
        drop(open);
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        error: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let comm = self.comm.get();
        let calls = comm.open_group().take().map(|(_, calls)| calls).unwrap_or_default();
        if !error.is_none() {
            return Ok(());
        }
        let work = comm.run(py, calls, self.async_op, self.stream)?;
        let work = work.map(|work| work.into_py_any(py)).transpose()?;
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = work;
        Ok(())
    }

    /// The result of `Comm::run`, after the end of the group.
    #[getter]
    fn work(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|work| work.clone_ref(py))
    }
}
