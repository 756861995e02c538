//! Backend `nccl`: NVIDIA's NCCL, loaded at run time; by the cargo feature `cuda`.

#[cfg(feature = "cuda")]
mod communicator;
#[cfg(feature = "cuda")]
mod library;

#[cfg(feature = "cuda")]
pub(super) use self::communicator::make;
#[cfg(feature = "cuda")]
pub use self::library::{find, places};

#[cfg(not(feature = "cuda"))]
pub(super) use self::absent::{find, make};

#[cfg(not(feature = "cuda"))]
mod absent {
    use std::sync::Arc;

    use crate::process_group::Backend;
    use crate::process_group::gpu::{CudaContext, not_built};
    use tinynccl_comm::Comm;
    use tinynccl_plan::error::Result;
    use tinynccl_sys::config::Config;

    pub(in crate::process_group) fn find(_config: &Config) -> Result<String> {
        Err(not_built())
    }

    pub(in crate::process_group) fn make(_comm: &Comm, _context: Arc<CudaContext>) -> Result<Arc<dyn Backend>> {
        Err(not_built())
    }
}
