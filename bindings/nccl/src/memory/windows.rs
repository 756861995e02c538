//! Windows: buffers that all ranks register together, so that they reach each other's.
//!
//! A window is a registration of [`DeviceComm`]. On the hosted path there is none: the window is NULL, as NCCL's is
//! where ranks do not reach each other, and calls use the buffer like any other.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use tinynccl::cuda::{DeviceComm, Path, Uncaptured};

use super::buffers;
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::abi::{WIN_ALIGNMENT, Window as Opaque};
use crate::comm::communicator::Communicator;
use crate::comm::gpu::Current;
use crate::comm::handle::{Handle, handle};
use crate::comm::registered::{Window, find};
use crate::submit::group;

/// Returns the window that a caller names, which must be `comm`'s.
pub(crate) fn find_of(win: *mut Opaque, comm: &Arc<Communicator>) -> Result<Arc<Window>> {
    let window = find(win)?;
    if window.comm != identity(comm) {
        return Err(Error::argument(format!("window {win:p} is of another communicator than {}", comm.name())));
    }
    Ok(window)
}

fn identity(comm: &Arc<Communicator>) -> usize {
    Arc::as_ptr(comm) as usize
}

/// Returns true if windows are registered: where kernels or copies reach the other ranks' memory.
pub(crate) fn reaches(device: &DeviceComm) -> bool {
    matches!(device.path(), Path::Peer | Path::Phased)
}

/// Registers a buffer, collectively. Returns the address that stands for the window, or null without a window.
fn register(comm: &Arc<Communicator>, address: u64, bytes: usize) -> Result<*mut Opaque> {
    // Not `device`: a communicator is not ready for calls while this is under way.
    let connected =
        comm.connected().ok_or_else(|| Error::internal("a window of a communicator that has not started"))?;
    let device = &connected.device;
    let (_current, _uncaptured) = (Current::enter(device.context())?, Uncaptured::begin());
    if !reaches(device) {
        log::info!(
            "communicator {}: {bytes} bytes at {address:#x} get no window: {}",
            comm.name(),
            device.path_reason()
        );
        return Ok(std::ptr::null_mut());
    }
    if device.size() > 1 {
        comm.windows().ensure_signals(|| Ok(device.signals()?))?;
    }
    // SAFETY: `owner` frees memory of ncclMemAlloc. Other memory must stay until the communicator is destroyed, or all
    // ranks have deregistered it and registered another: docs/nccl.md documents this for callers.
    let registration = unsafe { device.register_owned(address, bytes, buffers::owner(address)) }?;
    log::info!(
        "communicator {}: {bytes} bytes at {address:#x} are a window, {}",
        comm.name(),
        if registration.is_registered() { "used without copies" } else { "used like any other memory" }
    );
    Ok(comm.windows().add(Window { comm: identity(comm), rank: device.rank(), address, bytes, registration }))
}

export! {
    /// Registers a buffer together with all ranks of the communicator, each with its own buffer. It waits for them; in
    /// a group, `ncclGroupEnd` does, and writes `*win`.
    fn ncclCommWindowRegister / pncclCommWindowRegister [comm] (
        comm: Handle, buff: *mut c_void, size: usize, win: *mut *mut Opaque, flags: c_int
    ) {
        group::recorded((|| {
            // SAFETY: NULL or the caller's variable.
            let to = unsafe { out("win", win) }?;
            *to = std::ptr::null_mut();
            let comm = handle(comm)?;
            if buff.is_null() || size == 0 {
                return Err(Error::argument(format!("buff is {buff:p} of {size} bytes, expected memory of the GPU")));
            }
            if !(buff as usize).is_multiple_of(WIN_ALIGNMENT) {
                return Err(Error::argument(format!(
                    "buff is {buff:p}, expected a multiple of {WIN_ALIGNMENT}: ncclMemAlloc gives such memory"
                )));
            }
            // All windows are symmetric and ordered here.
            log::debug!("ncclCommWindowRegister: flags {flags:#x}");
            comm.device()?;
            let (address, to) = (buff as u64, win as usize);
            let run = move |comm: &Arc<Communicator>| {
                let window = register(comm, address, size)?;
                // SAFETY: the caller's variable, which must live until ncclGroupEnd.
                unsafe { (to as *mut *mut Opaque).write(window) };
                Ok(())
            };
            group::submit_on(&comm, run, |_| ())
        })())
    }

    /// Ends a window, on this rank alone; NULL does nothing. The ranks must not use it any more.
    fn ncclCommWindowDeregister / pncclCommWindowDeregister [comm] (comm: Handle, win: *mut Opaque) {
        group::recorded((|| {
            let comm = handle(comm)?;
            if win.is_null() {
                return Ok(());
            }
            find_of(win, &comm)?;
            comm.windows().remove(win);
            Ok(())
        })())
    }

    /// Writes the address that `ncclCommWindowRegister` got; NULL for the NULL window of a communicator without
    /// windows.
    fn ncclWinGetUserPtr / pncclWinGetUserPtr [comm] (comm: Handle, win: *mut Opaque, pointer: *mut *mut c_void) {
        // SAFETY: NULL or the caller's variable.
        let pointer = unsafe { out("outUserPtr", pointer) }?;
        *pointer = std::ptr::null_mut();
        let comm = handle(comm)?;
        if win.is_null() && !reaches(comm.device()?) {
            return Ok(());
        }
        *pointer = find_of(win, &comm)?.address as *mut c_void;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use crate::abi::config::Options;

    #[test]
    fn a_window_that_does_not_exist_is_named() {
        let comm = Arc::new(Communicator::starting(Options::standard(), 0, Some((0, 2))));
        for win in [std::ptr::null_mut(), 0x7000 as *mut Opaque] {
            let error = find_of(win, &comm).unwrap_err();
            assert_eq!(error.status, Status::InvalidArgument);
            assert!(error.text.contains("ncclCommWindowRegister"), "{}", error.text);
        }
        let error = comm.windows().signals().unwrap_err();
        assert_eq!(error.status, Status::InvalidUsage);
        assert!(error.text.contains("ncclCommWindowRegister first"), "{}", error.text);
    }
}
