//! Backend `mpi`: an MPI library, by the cargo feature `mpi`.

#[cfg(feature = "mpi")]
mod agree;
#[cfg(feature = "mpi")]
mod collectives;
#[cfg(feature = "mpi")]
mod message;
#[cfg(feature = "mpi")]
mod types;
#[cfg(feature = "mpi")]
mod world;

#[cfg(feature = "mpi")]
pub(super) use self::world::{find, make};

#[cfg(not(feature = "mpi"))]
pub(super) use self::absent::{find, make};

#[cfg(not(feature = "mpi"))]
mod absent {
    use std::sync::Arc;

    use crate::process_group::Backend;
    use tinynccl_comm::Comm;
    use tinynccl_plan::error::{Error, Result};

    pub(in crate::process_group) fn find(_comm: &Comm) -> Result<String> {
        Err(Error::Unsupported {
            what: "MPI".to_owned(),
            detail:
                "this program was built without it: build with the cargo feature `mpi`, which needs mpicc and libclang"
                    .to_owned(),
        })
    }

    pub(in crate::process_group) fn make(comm: &Comm) -> Result<Arc<dyn Backend>> {
        find(comm).and_then(|_| Err(Error::invalid("backend mpi", "not built")))
    }
}
