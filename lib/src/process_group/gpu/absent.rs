//! A build without CUDA. Every match on device memory stays as it is: its arm has a value that cannot be made.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::process_group::Backend;
use tinynccl_comm::{Comm, RawCall};
use tinynccl_plan::error::{Error, Result};

/// Any of CUDA's types in a build without CUDA: it has no values.
#[derive(Debug, Clone)]
pub(crate) struct Absent(Infallible);

pub(crate) type CudaContext = Absent;
pub(crate) type DeviceComm = Absent;
pub(crate) type Enqueued = Absent;
pub(crate) type Stream = Absent;

/// In place of cudarc's guard of a buffer that is in use.
#[derive(Debug)]
pub(crate) struct Guard<'a>(Absent, PhantomData<&'a ()>);

/// As cudarc's: the end of a buffer is the end of its use.
impl Drop for Guard<'_> {
    fn drop(&mut self) {}
}

/// The error of a call that needs CUDA.
pub(crate) fn not_built() -> Error {
    Error::Unsupported {
        what: "a GPU".to_owned(),
        detail: "this program was built without CUDA: build with the cargo feature `cuda`".to_owned(),
    }
}

pub(crate) fn device_count() -> Result<usize> {
    Err(not_built())
}

pub(crate) fn open(_number: usize) -> Result<Arc<CudaContext>> {
    Err(not_built())
}

pub(crate) fn bind(_op: &str, context: &CudaContext) -> Result<()> {
    match context.0 {}
}

pub(crate) unsafe fn copy(
    _op: &str,
    context: &CudaContext,
    _stream: usize,
    _from: u64,
    _to: u64,
    _bytes: usize,
) -> Result<()> {
    match context.0 {}
}

/// The methods of a context, a stream, a communicator and an enqueued call that process groups use.
impl Absent {
    pub(crate) fn new(_comm: &Comm, context: &Arc<CudaContext>) -> Result<DeviceComm> {
        match context.0 {}
    }
    pub(crate) fn mark(
        _backend: &Arc<dyn Backend>,
        stream: &Stream,
        _op: &'static str,
        _timeout: Duration,
    ) -> Result<Enqueued> {
        match stream.0 {}
    }
    pub(crate) fn handle(&self) -> usize {
        match self.0 {}
    }
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        match self.0 {}
    }
    pub(crate) fn rank(&self) -> usize {
        match self.0 {}
    }
    pub(crate) fn check(&self) -> Result<()> {
        match self.0 {}
    }
    pub(crate) fn abort(&self) {
        match self.0 {}
    }
    pub(crate) unsafe fn enqueue_group(&self, _stream: Stream, _calls: &[RawCall]) -> Result<()> {
        match self.0 {}
    }
    pub(crate) fn is_over(&self) -> bool {
        match self.0 {}
    }
    pub(crate) fn wait(&self) -> Result<()> {
        match self.0 {}
    }
    pub(crate) fn wait_for(&self, _timeout: Duration) -> Result<bool> {
        match self.0 {}
    }
    pub(crate) fn give<B>(&self, _buffers: Option<B>) -> Result<B> {
        match self.0 {}
    }
    pub(crate) fn poll(self: &Arc<Self>, _waker: &Waker) -> Poll<Result<()>> {
        match self.0 {}
    }
}
