//! What a build without the feature `verbs` has instead of it: the addresses that other ranks tell, and a clear error.

#[path = "address.rs"]
mod address;

pub use address::VerbsAddress;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::transport::fabric::{Fabric, Site};

fn missing() -> Error {
    Error::Unsupported {
        what: "RDMA (TINYNCCL_TRANSPORT=verbs)".to_owned(),
        detail: "this program was built without it; build with `--features verbs` (needs libibverbs-dev, libnl-3-dev, \
                 libnl-route-3-dev, libclang-dev, cmake and pkg-config), or set TINYNCCL_TRANSPORT=auto"
            .to_owned(),
    }
}

pub(crate) fn bind(_site: &Site<'_>) -> Result<Box<dyn Fabric>> {
    Err(missing())
}

/// The ports of RDMA devices that `TINYNCCL_TRANSPORT=verbs` would use on this machine.
///
/// # Errors
/// [`Error::Unsupported`]: this build has no RDMA.
pub fn rdma_ports(_config: &Config) -> Result<Vec<VerbsAddress>> {
    Err(missing())
}
