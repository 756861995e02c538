//! Calls whose memory is on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, result, sys};
use pyo3::prelude::*;
use tinynccl::comm::RawCall;
use tinynccl::cuda::{self, DeviceComm};
use tinynccl::{Comm, Error, Result};

use crate::calls::Prepared;
use crate::stream::{Events, Stream};

/// A rank's communicator on its GPU.
pub(crate) struct Gpu {
    comm: DeviceComm,
    context: Arc<CudaContext>,
    ordinal: usize,
    events: Arc<Events>,
}

impl Gpu {
    /// Joins the ranks of `comm`; every rank must call it.
    pub(crate) fn new(comm: &Comm, ordinal: usize) -> Result<Gpu> {
        cuda::available()?;
        let _current = Current::keep();
        let context = CudaContext::new(ordinal).map_err(|e| failed("cuda", format!("opening GPU {ordinal}"), e))?;
        let comm = DeviceComm::new(comm, &context)?;
        let events = Events::new(&context);
        Ok(Gpu { comm, context, ordinal, events })
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(crate) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.comm.check()
    }

    pub(crate) fn abort(&self) {
        self.comm.abort();
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let _current = Current::keep();
        self.bind()?;
        self.comm.synchronize()
    }

    /// Orders all later work of `stream` after the event.
    ///
    /// # Safety
    /// It is a stream of this GPU.
    pub(crate) unsafe fn wait_for(&self, stream: u64, event: &CudaEvent) -> Result<()> {
        let _current = Current::keep();
        self.bind()?;
        // SAFETY: forwarded from the caller.
        unsafe { wait(stream as sys::CUstream, event) }
    }

    /// An event behind all that is in the stream.
    ///
    /// # Safety
    /// It is a stream of this GPU.
    pub(crate) unsafe fn mark(&self, stream: u64) -> Result<CudaEvent> {
        let _current = Current::keep();
        self.bind()?;
        // SAFETY: forwarded from the caller.
        unsafe { self.record(stream as sys::CUstream) }
    }

    /// # Safety
    /// As [`Gpu::mark`], with the GPU bound.
    unsafe fn record(&self, stream: sys::CUstream) -> Result<CudaEvent> {
        let event = self.events.take()?;
        // SAFETY: we alone use the event; the caller guarantees the stream.
        unsafe { result::event::record(event.cu_event(), stream) }
            .map_err(|e| failed("cuda", "marking a place in a stream".to_owned(), e))?;
        Ok(event)
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| failed("cuda", format!("taking GPU {}", self.ordinal), e))
    }

    /// Enqueues the calls on `stream`, behind the stream that it names; returns an event at their end, if one is
    /// needed.
    ///
    /// # Safety
    /// The calls' memory must be of this GPU, as long as the call says, and stay until the stream has run them. The
    /// streams must be of this GPU, and stay until the next call.
    pub(crate) unsafe fn enqueue(&self, calls: &[Prepared], stream: Stream) -> Result<Option<CudaEvent>> {
        let _current = Current::keep();
        self.bind()?;
        let Stream { handle, behind } = stream;
        let stream = handle as sys::CUstream;
        // SAFETY: forwarded from the caller.
        unsafe {
            if let Some(other) = behind.filter(|other| *other != handle) {
                let ready = self.record(other as sys::CUstream)?;
                let waits = wait(stream, &ready);
                // The event may be reused: a wait refers to the last record before it.
                self.events.put(ready);
                waits?;
            }
            let calls: Vec<RawCall> = calls.iter().map(|call| call.raw.clone()).collect();
            self.comm.enqueue_group(stream, &calls)?;
            behind.map(|_| self.record(stream)).transpose()
        }
    }
}

/// # Safety
/// It is a stream of the GPU that is bound, whose event it is.
unsafe fn wait(stream: sys::CUstream, event: &CudaEvent) -> Result<()> {
    let flags = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: the event lives; the caller guarantees the stream.
    unsafe { result::stream::wait_event(stream, event.cu_event(), flags) }
        .map_err(|e| failed("cuda", "letting a stream wait for another".to_owned(), e))
}

/// The number of GPUs that CUDA sees; 0 without CUDA.
#[pyfunction]
pub(crate) fn cuda_device_count() -> usize {
    tinynccl::cuda::device_count().unwrap_or(0)
}

/// The context of this thread, put back when dropped: torch queries the driver for the current GPU.
pub(crate) struct Current(sys::CUcontext);

impl Current {
    pub(crate) fn keep() -> Current {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes the context; without one it is NULL. The driver was found before a `Gpu` was created.
        let _ = unsafe { sys::cuCtxGetCurrent(&mut context) };
        Current(context)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: it was current before.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

pub(crate) fn failed(op: &str, detail: String, error: cudarc::driver::DriverError) -> Error {
    Error::Cuda { op: op.to_owned(), detail, status: format!("{error:?}") }
}
