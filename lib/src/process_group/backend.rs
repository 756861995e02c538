//! What a backend must do, so that the three are interchangeable.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;

use crate::comm::Inner;
use crate::comm::engine::bound::Bound;
use crate::cuda::{DeviceComm, Stream};
use crate::error::{Error, Result};
use crate::wire::Collective;

/// Who carries a group's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendType {
    /// The best one that all ranks have; [`ProcessGroup::why`](super::ProcessGroup::why) says which and why.
    Auto,
    /// This library: host memory over shared memory, TCP or RDMA; device memory by kernels between up to 8 GPUs of one host,
    /// through the hosts' memory between others.
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

/// One rank's part of a backend. Calls are checked: lengths, types and ranks fit each other.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    fn kind(&self) -> BackendType;

    /// Carries a call on host memory to its end. `comm` joins the same ranks; `background` on its progress thread.
    ///
    /// # Safety
    /// The call's memory must be valid, and untouched by others, until this returns.
    unsafe fn run(&self, comm: &Inner, call: &Bound, background: bool) -> Result<()>;

    /// Carries several to their end as one, so that the order of sends and receives among them does not matter.
    ///
    /// # Safety
    /// As [`Backend::run`].
    unsafe fn run_batch(&self, comm: &Inner, calls: &[Bound]) -> Result<()>;

    /// Puts calls on device memory into a stream, as one.
    ///
    /// # Safety
    /// The calls' memory must be of the group's device, valid, and untouched by others, until the stream has passed them.
    unsafe fn enqueue(&self, calls: &[Bound], stream: &Stream) -> Result<()>;

    /// The GPU, if the group has one.
    fn device(&self) -> Option<&Arc<CudaContext>>;

    /// Our device communicator, if that is what carries the calls.
    fn device_comm(&self) -> Option<&DeviceComm> {
        None
    }

    /// The failure of a call that was enqueued before, if one has failed.
    fn check(&self) -> Result<()>;

    /// A stream did not pass a call in time: ends what can be ended, and says what is known.
    fn overdue(&self, op: &str, waited: Duration) -> Error;

    /// Ends calls in flight, from any thread.
    fn abort(&self, reason: &str);
}

/// A call on memory that the backend does not carry.
pub(super) fn not_carried(kind: BackendType, collective: Collective, place: &str, instead: &str) -> Error {
    Error::Unsupported { what: format!("{collective} of {place} by backend {kind}"), detail: instead.to_owned() }
}
