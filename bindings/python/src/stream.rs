//! The stream of a call on a GPU, and the end of the work that was enqueued on one.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaEvent};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tinynccl::Result;

use crate::device::{Current, Gpu, failed};
use crate::errors::{Names, invalid, raise};

/// Handles of streams of one GPU.
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) handle: u64,
    /// The calls wait for the work in this stream, and an event marks their end.
    pub(crate) behind: Option<u64>,
}

impl From<u64> for Stream {
    fn from(handle: u64) -> Stream {
        Stream { handle, behind: None }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Stream {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Stream> {
        if object.is_instance_of::<PyTuple>() {
            let (handle, behind) = object.extract()?;
            return Ok(Stream { handle, behind: Some(behind) });
        }
        object.extract::<u64>().map(Stream::from)
    }
}

/// Events of a GPU. Making one takes longer than recording it, so they are kept.
pub(crate) struct Events {
    context: Arc<CudaContext>,
    spare: Mutex<Vec<CudaEvent>>,
}

impl Events {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Arc<Events> {
        Arc::new(Events { context: context.clone(), spare: Mutex::default() })
    }

    /// Takes an event that no one else uses until it is put back.
    pub(crate) fn take(&self) -> Result<CudaEvent> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let new = || self.context.new_event(None).map_err(|e| failed("cuda", "making an event".to_owned(), e));
        spare.map_or_else(new, Ok)
    }

    pub(crate) fn put(&self, event: CudaEvent) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

/// The end of the calls that were put into a stream.
#[pyclass(frozen, module = "tinynccl._core")]
pub(crate) struct End {
    /// The event, with the pool to which it goes back; `None` only while this is dropped.
    event: Option<(CudaEvent, Arc<Events>)>,
    gpu: Weak<Gpu>,
    rank: usize,
    names: Names,
}

impl End {
    pub(crate) fn new(event: CudaEvent, gpu: &Arc<Gpu>, rank: usize, names: &Names) -> End {
        End { event: Some((event, gpu.events().clone())), gpu: Arc::downgrade(gpu), rank, names: names.clone() }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some((event, events)) = self.event.take() {
            // The last one frees them all.
            let _current = (Arc::strong_count(&events) == 1).then(Current::keep);
            events.put(event);
            drop(events);
        }
    }
}

#[pymethods]
impl End {
    /// Orders all later work of `stream` after this; the host does not wait. Raises an error of the GPU.
    fn before(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let Some((gpu, (event, _))) = self.gpu.upgrade().zip(self.event.as_ref()) else {
            return Err(invalid(py, "wait", format!("rank {}: the communicator is closed", self.rank)));
        };
        // SAFETY: the Python caller guarantees that the handle is a stream, as with `stream=` of every call.
        gpu.check().and_then(|()| unsafe { gpu.wait_for(stream, event) }).map_err(|e| raise(py, &self.names, &e))
    }

    /// Returns true once the stream has passed it; raises an error of the GPU, also one that ended earlier work early.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        let _current = Current::keep();
        let Some((event, _)) = &self.event else { return Ok(true) };
        let complete = event.try_is_complete();
        let complete = complete.map_err(|e| failed("cuda", "asking how far a stream is".to_owned(), e));
        let checked = complete.and_then(|complete| match self.gpu.upgrade() {
            Some(gpu) if complete => gpu.check().map(|()| true),
            _ => Ok(complete),
        });
        checked.map_err(|e| raise(py, &self.names, &e))
    }
}
