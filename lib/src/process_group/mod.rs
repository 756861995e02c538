//! Process groups: one API, like `torch.distributed`'s, over interchangeable backends.
//!
//! A [`ProcessGroup`] is one rank's membership in a group of ranks whose calls are carried by this library, by NVIDIA's
//! NCCL or by an MPI library ([`BackendType`]). Every rank makes the same calls in the same order. Buffers are slices
//! of the host or memory of a GPU ([`Buffer`], [`BufferMut`]): the same calls take both.
//!
//! | | tinynccl | nccl | mpi |
//! | --- | --- | --- | --- |
//! | host memory | yes | no | yes |
//! | device memory | up to 8 GPUs of one host; others through the hosts' memory | yes | no |
//! | needs | for GPUs feature `cuda` | feature `cuda`, libnccl.so.2, a GPU per rank | feature `mpi`, `mpirun` |
//! | ranks that disagree | an error naming both calls | a time-out | an error naming both calls |
//!
//! Calls on host memory are complete when they return. Calls on device memory are enqueued on the buffer's stream:
//! blocking calls wait until the stream has completed them, asynchronous ones return at once.

// Without CUDA nothing makes a buffer on a device, so what follows from one is not called.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

mod asynchronous;
mod backend;
mod batch;
mod buffer;
mod choose;
mod collectives;
mod gpu;
mod groups;
mod init;
mod make;
mod mpi;
mod nccl;
mod own;
mod owned;
mod tinynccl;
mod work;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaContext, CudaStream};
use tinynccl_comm::Comm;
#[cfg(feature = "cuda")]
use tinynccl_cuda::DeviceComm;
use tinynccl_plan::error::Result;

pub(crate) use backend::Backend;
pub use backend::BackendType;
pub use batch::Batch;
pub use buffer::{Buffer, BufferMut};
#[cfg(feature = "cuda")]
pub use gpu::OnDevice;
pub use init::{Device, InitOptions, init_process_group};
#[cfg(feature = "cuda")]
pub use nccl::{find as nccl_library, places as nccl_places};
pub use owned::Owned;
pub use work::Work;

/// One rank's membership in a group of ranks.
///
/// ```
/// # fn main() -> tinynccl::Result<()> {
/// use tinynccl::process_group::{BackendType, Device, ProcessGroup};
/// use tinynccl::{Comm, Config, ReduceOp, Result};
///
/// fn rank(comm: Comm) -> Result<()> {
///     let group = ProcessGroup::new(comm, BackendType::Auto, Device::None)?;
///     println!("{}: {}", group.backend(), group.why());
///     let mut sum = [group.rank() as f32; 4];
///     group.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
///     assert_eq!(sum, [3.0; 4]);
///     let work = group.all_reduce_in_place_async(vec![1.0f64; 1000], ReduceOp::Avg)?;
///     // Computes on, meanwhile.
///     assert_eq!(work.wait()?, [1.0; 1000]);
///     Ok(())
/// }
///
/// let ranks = Comm::threads(3, Config::default())?.into_iter().map(|comm| std::thread::spawn(|| rank(comm)));
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().expect("no rank panics")?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct ProcessGroup {
    // Dropped first: it finishes the asynchronous calls.
    comm: Comm,
    backend: Arc<dyn Backend>,
    why: String,
    /// Groups made of this one so far, for keys of exchanges.
    groups: AtomicU32,
}

impl ProcessGroup {
    fn assemble(comm: Comm, backend: Arc<dyn Backend>, why: String) -> ProcessGroup {
        ProcessGroup { comm, backend, why, groups: AtomicU32::new(0) }
    }

    /// Our rank, in `0..size`.
    #[inline]
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Number of ranks.
    #[inline]
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// Our number among the ranks of this host, as the launcher counts.
    pub fn local_rank(&self) -> usize {
        self.comm.local_rank()
    }

    /// The ranks' numbers in the world, in the order of this group.
    pub fn global_ranks(&self) -> &[usize] {
        &self.comm.inner().state().members
    }

    /// The backend of the calls; never [`BackendType::Auto`].
    pub fn backend(&self) -> BackendType {
        self.backend.kind()
    }

    /// Why this backend, in a sentence.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Our GPU, if the group has one. Make streams of this context.
    #[cfg(feature = "cuda")]
    pub fn device(&self) -> Option<&Arc<CudaContext>> {
        self.backend.device()
    }

    /// The communicator of the same ranks: host memory over this library, whatever the group's own backend.
    ///
    /// Asynchronous calls of the group and calls of the communicator run in one order, so every rank makes both in the
    /// same order. A group that has lost a rank goes on as a new one of the communicator's [`shrink`](Comm::shrink):
    ///
    /// ```no_run
    /// use tinynccl::process_group::{Device, ProcessGroup};
    ///
    /// fn go_on(group: ProcessGroup) -> tinynccl::Result<ProcessGroup> {
    ///     group.comm().revoke()?;
    ///     ProcessGroup::new(group.comm().shrink()?, group.backend(), Device::LocalRank)
    /// }
    /// ```
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// The device communicator of the same ranks, if backend tinynccl has GPUs: to query or set how calls run.
    #[cfg(feature = "cuda")]
    pub fn device_comm(&self) -> Option<&DeviceComm> {
        self.backend.device_comm()
    }

    /// Waits until `stream` has completed its work, at most the group's deadline. Returns the failure of earlier
    /// enqueued calls, if one has failed.
    #[cfg(feature = "cuda")]
    pub fn synchronize(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.mark(&stream.into(), "synchronize")?.wait()
    }

    /// Ends the group on every rank from any thread: calls in flight and later ones give
    /// [`Error::Aborted`](tinynccl_plan::Error::Aborted). MPI calls that have begun on all ranks go on to their end.
    pub fn abort(&self, reason: &str) {
        self.backend.abort(reason);
        self.comm.abort(reason);
    }

    /// Finishes asynchronous calls and leaves. Returns the group's failure, if it has failed.
    pub fn close(self) -> Result<()> {
        let ProcessGroup { comm, backend, .. } = self;
        let device = backend.check();
        comm.close().and(device)
    }
}

impl From<Comm> for ProcessGroup {
    /// The group of a communicator's ranks, for host memory: backend tinynccl, which every rank has, so no exchange is
    /// needed.
    fn from(comm: Comm) -> ProcessGroup {
        ProcessGroup::assemble(comm, Arc::new(tinynccl::Tinynccl::on_the_host()), "the communicator's own".to_owned())
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup (rank {} of {}, {})", self.rank(), self.size(), self.backend())
    }
}
