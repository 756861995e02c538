//! A backend of a kind.

use std::sync::Arc;

use super::backend::{Backend, BackendType};
use super::gpu::CudaContext;
use super::{mpi, nccl, tinynccl};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};

/// Makes our rank's part; every rank of `comm` calls it.
pub(super) fn make(kind: BackendType, comm: &Comm, device: Option<Arc<CudaContext>>) -> Result<Arc<dyn Backend>> {
    Ok(match kind {
        BackendType::Auto | BackendType::Tinynccl => Arc::new(tinynccl::Tinynccl::new(comm, device)?),
        BackendType::Nccl => {
            let context = device.ok_or_else(|| Error::invalid("backend nccl", "the group has no GPU"))?;
            nccl::make(comm, context)?
        }
        BackendType::Mpi => mpi::make(comm)?,
    })
}
