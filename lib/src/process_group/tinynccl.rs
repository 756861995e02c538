//! Backend `tinynccl`: the communicator itself, and a device communicator where the group has GPUs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::{Backend, BackendType};
use super::gpu::{self, CudaContext, DeviceComm, Stream};
use tinynccl_comm::{Comm, Inner, RawCall};
use tinynccl_plan::error::{Error, Result};

/// Longest wait for the own error of a call that is overdue.
const OWN_ERROR: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Tinynccl {
    device: Option<DeviceComm>,
}

impl Tinynccl {
    pub(super) fn new(comm: &Comm, context: Option<Arc<CudaContext>>) -> Result<Tinynccl> {
        Ok(Tinynccl { device: context.map(|context| DeviceComm::new(comm, &context)).transpose()? })
    }

    /// Without GPUs.
    pub(super) fn on_the_host() -> Tinynccl {
        Tinynccl { device: None }
    }
}

impl Backend for Tinynccl {
    fn kind(&self) -> BackendType {
        BackendType::Tinynccl
    }

    #[inline]
    unsafe fn run(&self, comm: &Inner, call: &RawCall, background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { comm.execute(call, background) }
    }

    unsafe fn run_batch(&self, comm: &Inner, calls: &[RawCall]) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { comm.batch("batch", calls, false) }
    }

    unsafe fn enqueue(&self, calls: &[RawCall], stream: &Stream) -> Result<()> {
        let device = self.device.as_ref().ok_or_else(|| Error::Unsupported {
            what: "device memory in a group without GPUs".to_owned(),
            detail: "ask for one at the start: InitOptions::device(Device::LocalRank)".to_owned(),
        })?;
        gpu::bind("enqueue", device.context())?;
        // SAFETY: forwarded from the caller.
        unsafe { device.enqueue_group(stream.clone(), calls) }
    }

    fn device(&self) -> Option<&Arc<CudaContext>> {
        self.device.as_ref().map(DeviceComm::context)
    }

    fn device_comm(&self) -> Option<&DeviceComm> {
        self.device.as_ref()
    }

    fn check(&self) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), DeviceComm::check)
    }

    /// Kernels and the hosts' calls have the same deadline, and name the rank that they waited for. They began a little
    /// later, so they get a moment. If none fails, other work holds the stream.
    fn overdue(&self, op: &str, waited: Duration) -> Error {
        let rank = self.device.as_ref().map_or(0, DeviceComm::rank);
        let end = Instant::now() + OWN_ERROR;
        let mut failure = self.check().err();
        while failure.is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            failure = self.check().err();
        }
        self.abort("overdue");
        failure.unwrap_or_else(|| Error::Timeout {
            op: op.to_owned(),
            rank,
            waited,
            missing: Vec::new(),
            detail: "the stream has not reached the end of the call; earlier work in the stream may take as long"
                .to_owned(),
        })
    }

    fn abort(&self, _reason: &str) {
        if let Some(device) = &self.device {
            device.abort();
        }
    }
}
