//! GPUs of process groups: CUDA's types with the cargo feature `cuda`, without it a type that has no values.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod awaited;
#[cfg(feature = "cuda")]
mod buffer;
#[cfg(feature = "cuda")]
mod enqueued;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{CudaContext, DeviceComm, Enqueued, Guard, Stream, bind, copy, device_count, not_built, open};
#[cfg(feature = "cuda")]
pub use buffer::OnDevice;
#[cfg(feature = "cuda")]
pub(super) use cudarc::driver::{CudaContext, SyncOnDrop as Guard};
#[cfg(feature = "cuda")]
pub(super) use enqueued::{Enqueued, bind, open};
#[cfg(feature = "cuda")]
pub(super) use tinynccl_cuda::{DeviceComm, Stream, copy, device_count};
