//! The trait of the interchangeable backends.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::gpu::{CudaContext, DeviceComm, Stream};
use tinynccl_comm::Inner;
use tinynccl_comm::RawCall;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// The backend of a group's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendType {
    /// The best one that all ranks have; [`ProcessGroup::why`](super::ProcessGroup::why) names it and the reason.
    Auto,
    /// This library: host memory over shared memory, TCP or RDMA; device memory by kernels between up to 8 GPUs of one
    /// host, through the hosts' memory between others.
    Tinynccl,
    /// NVIDIA's NCCL, loaded at run time: device memory.
    Nccl,
    /// An MPI library, by the cargo feature `mpi`: host memory.
    Mpi,
}

impl BackendType {
    /// Every one, `Auto` first.
    pub const ALL: [BackendType; 4] = [BackendType::Auto, BackendType::Tinynccl, BackendType::Nccl, BackendType::Mpi];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            BackendType::Auto => "auto",
            BackendType::Tinynccl => "tinynccl",
            BackendType::Nccl => "nccl",
            BackendType::Mpi => "mpi",
        }
    }
}

impl fmt::Display for BackendType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendType {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        BackendType::ALL
            .into_iter()
            .find(|b| b.name() == s)
            .ok_or_else(|| format!("unknown backend '{s}', expected auto, tinynccl, nccl or mpi"))
    }
}

/// One rank's part of a backend. Lengths, types and ranks of calls have been checked.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    fn kind(&self) -> BackendType;

    /// Runs a call on host memory to its end. `comm` has the same ranks; `background`: on its progress thread.
    ///
    /// # Safety
    /// The call's memory must be valid, and untouched by others, until this returns.
    unsafe fn run(&self, comm: &Inner, call: &RawCall, background: bool) -> Result<()>;

    /// Runs several as one, so that the order of sends and receives among them does not matter.
    ///
    /// # Safety
    /// As [`Backend::run`].
    unsafe fn run_batch(&self, comm: &Inner, calls: &[RawCall]) -> Result<()>;

    /// Enqueues calls on device memory on a stream, as one.
    ///
    /// # Safety
    /// The calls' memory must be of the group's device, valid, and untouched by others, until the stream has passed
    /// them.
    unsafe fn enqueue(&self, calls: &[RawCall], stream: &Stream) -> Result<()>;

    /// The GPU, if the group has one.
    fn device(&self) -> Option<&Arc<CudaContext>>;

    /// Our device communicator, if it runs the calls.
    fn device_comm(&self) -> Option<&DeviceComm> {
        None
    }

    /// The failure of an earlier enqueued call, if one has failed.
    fn check(&self) -> Result<()>;

    /// A stream did not complete a call in time: aborts the calls where possible, and returns the error.
    fn overdue(&self, op: &str, waited: Duration) -> Error;

    /// Ends calls in flight, from any thread.
    fn abort(&self, reason: &str);
}

/// A call on memory that the backend does not support.
pub(super) fn not_carried(kind: BackendType, collective: Collective, place: &str, instead: &str) -> Error {
    Error::Unsupported { what: format!("{collective} of {place} by backend {kind}"), detail: instead.to_owned() }
}
