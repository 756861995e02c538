//! `ncclCommMemStats`, `ncclCommSuspend`, `ncclCommResume`: the memory of a communicator.

use std::ffi::c_int;

use tinynccl::cuda::Path;

use crate::abi;
use crate::abi::error::Error;
use crate::abi::export::{export, out};
use crate::comm::handle::{Handle, handle};

export! {
    /// Writes a figure of the communicator's memory on our GPU, in bytes. None of it can be suspended.
    fn ncclCommMemStats / pncclCommMemStats [comm] (comm: Handle, stat: c_int, value: *mut u64) {
        // SAFETY: NULL or the caller's variable.
        let value = unsafe { out("value", value) }?;
        let comm = handle(comm)?;
        let device = comm.device()?;
        // On the hosted path the memory is the host's.
        let bytes = if device.path() == Path::Hosted { 0 } else { device.window_bytes() as u64 };
        *value = match stat {
            abi::STAT_SUSPEND | abi::STAT_SUSPENDED => 0,
            abi::STAT_PERSIST | abi::STAT_TOTAL => bytes,
            _ => return Err(Error::argument(format!("stat is {stat}, expected 0 to {}", abi::STAT_TOTAL))),
        };
        Ok(())
    }

    /// Accepted, and nothing is freed: the memory of a communicator is mapped by its other ranks.
    fn ncclCommSuspend / pncclCommSuspend [comm] (comm: Handle, flags: c_int) {
        if flags != abi::SUSPEND_MEM {
            return Err(Error::argument(format!("flags is {flags}, expected {} (NCCL_SUSPEND_MEM)", abi::SUSPEND_MEM)));
        }
        let comm = handle(comm)?;
        comm.device()?;
        log::info!("communicator {}: suspended in name alone, its memory stays", comm.name());
        Ok(())
    }

    /// The end of `ncclCommSuspend`.
    fn ncclCommResume / pncclCommResume [comm] (comm: Handle) {
        handle(comm)?.device()?;
        Ok(())
    }
}
