//! Version, ranks, status and last error.

use std::ffi::{c_char, c_int};

use crate::abi::error::Error;
use crate::abi::export::{self, export, export_value, out};
use crate::abi::{Status, last_error};
use crate::comm::handle::{self, Handle, handle};
use crate::env::{debug, version};

export! {
    /// Writes the version that this library stands for: 22809 (2.28.9), or `TINYNCCL_NCCL_VERSION`. One that does not
    /// parse is `ncclInvalidUsage`.
    fn ncclGetVersion / pncclGetVersion [] (version: *mut c_int) {
        // SAFETY: NULL or the caller's variable.
        let version = unsafe { out("version", version) }?;
        *version = version::version();
        *version = version::checked().map_err(Error::usage)?;
        Ok(())
    }

    /// Writes the number of ranks.
    fn ncclCommCount / pncclCommCount [comm] (comm: Handle, count: *mut c_int) {
        // SAFETY: NULL or the caller's variable.
        *unsafe { out("count", count) }? = handle(comm)?.size()? as c_int;
        Ok(())
    }

    /// Writes our rank.
    fn ncclCommUserRank / pncclCommUserRank [comm] (comm: Handle, rank: *mut c_int) {
        // SAFETY: NULL or the caller's variable.
        *unsafe { out("rank", rank) }? = handle(comm)?.rank()? as c_int;
        Ok(())
    }

    /// Writes CUDA's number of our GPU.
    fn ncclCommCuDevice / pncclCommCuDevice [comm] (comm: Handle, device: *mut c_int) {
        // SAFETY: NULL or the caller's variable.
        *unsafe { out("device", device) }? = handle(comm)?.ordinal() as c_int;
        Ok(())
    }

    /// Writes `ncclInProgress` while the communicator starts or ends, the status of its failure if it has failed (the
    /// text is then in `ncclGetLastError`), else `ncclSuccess`.
    fn ncclCommGetAsyncError / pncclCommGetAsyncError [comm] (comm: Handle, error: *mut Status) {
        // SAFETY: NULL or the caller's variable.
        let error = unsafe { out("asyncError", error) }?;
        *error = handle(comm)?.async_error().unwrap_or_else(|failure| {
            export::keep(&comm, failure.text);
            failure.status
        });
        Ok(())
    }
}

export_value! {
    /// Returns the text of a status.
    fn ncclGetErrorString / pncclGetErrorString (result: c_int) -> *const c_char, c"unknown result code".as_ptr(); {
        let found = usize::try_from(result).ok().and_then(|result| Status::ALL.get(result));
        match found {
            Some(Status::Success) => c"no error",
            Some(Status::UnhandledCudaError) => c"unhandled cuda error",
            Some(Status::SystemError) => c"unhandled system error",
            Some(Status::InternalError) => c"internal error of tinynccl",
            Some(Status::InvalidArgument) => c"invalid argument",
            Some(Status::InvalidUsage) => c"invalid usage",
            Some(Status::RemoteError) => c"another process exited, or the network to it failed",
            Some(Status::InProgress) => c"operation in progress",
            Some(Status::Timeout) => c"a deadline passed",
            None => c"unknown result code",
        }
        .as_ptr()
    }

    /// Returns the text of the last failure: of `comm` if it has had one, else of this thread, else of the process.
    /// Valid until this thread's next call.
    fn ncclGetLastError / pncclGetLastError (comm: Handle) -> *const c_char, c"".as_ptr(); {
        last_error::last(handle::find(comm).and_then(|comm| comm.last_error()))
    }

    /// Reads `NCCL_DEBUG` and its relatives again.
    fn ncclResetDebugInit / pncclResetDebugInit () -> (), (); {
        debug::read();
    }
}
