//! Windows: buffers that all ranks register together, so that they reach each other's.
//!
//! A window is a [`Registration`] of [`DeviceComm`]. On the hosted path there is none: the window is NULL, as NCCL's is
//! where ranks do not reach each other, and calls use the buffer like any other.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tinynccl::cuda::{DeviceComm, Path, Registration, Signals, Uncaptured};

use crate::abi::{WIN_ALIGNMENT, Window as Opaque};
use crate::buffers;
use crate::export::{export, out};
use crate::fault::{Fault, Result};
use crate::gpu::Current;
use crate::group;
use crate::handle::{Handle, handle};
use crate::member::Member;

/// A registered buffer of a communicator.
#[derive(Debug)]
pub(crate) struct Window {
    /// Identity of the communicator.
    member: usize,
    rank: usize,
    address: u64,
    bytes: usize,
    registration: Registration,
}

impl Window {
    /// Its registration.
    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    /// Returns the address at which our device reaches byte `offset` of `peer`'s buffer; `None` if it does not.
    ///
    /// # Errors
    /// `ncclInvalidArgument` beyond the window's end.
    pub(crate) fn place(&self, peer: usize, offset: usize) -> Result<Option<u64>> {
        let place =
            if peer == self.rank { Some((self.address, self.bytes as u64)) } else { self.registration.place(peer) };
        let Some((at, bytes)) = place else { return Ok(None) };
        if offset as u64 >= bytes {
            return Err(Fault::argument(format!(
                "offset is {offset}, expected less than the {bytes} bytes of rank {peer}'s window"
            )));
        }
        Ok(Some(at + offset as u64))
    }
}

/// All windows of this process, by the address that stands for them: some functions take a window alone.
fn all() -> MutexGuard<'static, BTreeMap<usize, Arc<Window>>> {
    static ALL: Mutex<BTreeMap<usize, Arc<Window>>> = Mutex::new(BTreeMap::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The windows of a communicator. They end with it.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    numbers: Mutex<Vec<usize>>,
    /// Created with the first window, because that is a collective call of all ranks.
    signals: OnceLock<Signals>,
}

impl Windows {
    /// The memory by which ranks signal each other.
    ///
    /// # Errors
    /// `ncclInvalidUsage` before the first window.
    pub(crate) fn signals(&self) -> Result<&Signals> {
        self.signals.get().ok_or_else(|| {
            Fault::usage(
                "the communicator has no memory for signals yet: call ncclCommWindowRegister first, which makes it where the ranks \
                 reach each other's memory",
            )
        })
    }

    fn numbers(&self) -> MutexGuard<'_, Vec<usize>> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        for number in std::mem::take(&mut *self.numbers()) {
            let window = all().remove(&number);
            drop(window);
        }
    }
}

/// The window that a caller names.
pub(crate) fn find(win: *mut Opaque) -> Result<Arc<Window>> {
    let found = all().get(&(win as usize)).cloned();
    found.ok_or_else(|| Fault::argument(format!(
        "window is {win:p}, expected one that ncclCommWindowRegister gave and that is not deregistered (it gives NULL where the \
         ranks do not reach each other's memory)"
    )))
}

/// [`find`] for a window that must be `member`'s.
pub(crate) fn find_of(win: *mut Opaque, member: &Arc<Member>) -> Result<Arc<Window>> {
    let window = find(win)?;
    if window.member != identity(member) {
        return Err(Fault::argument(format!("window {win:p} is of another communicator than {}", member.name())));
    }
    Ok(window)
}

fn identity(member: &Arc<Member>) -> usize {
    Arc::as_ptr(member) as usize
}

/// Returns true if windows are registered: where kernels or copies reach the other ranks' memory.
pub(crate) fn reaches(device: &DeviceComm) -> bool {
    device.path() != Path::Hosted
}

/// Registers a buffer, collectively. Returns the address that stands for the window, or null without a window.
fn register(member: &Arc<Member>, address: u64, bytes: usize) -> Result<*mut Opaque> {
    // Not `device`: a communicator is not ready for calls while this is under way.
    let ranks = member.any_ranks().ok_or_else(|| Fault::internal("a window of a communicator that has not started"))?;
    let device = &ranks.device;
    let (_current, _uncaptured) = (Current::enter(device.context())?, Uncaptured::begin());
    if !reaches(device) {
        log::info!(
            "communicator {}: {bytes} bytes at {address:#x} get no window: {}",
            member.name(),
            device.path_reason()
        );
        return Ok(std::ptr::null_mut());
    }
    if device.size() > 1 && member.windows().signals.get().is_none() {
        let signals = device.signals()?;
        // Windows of a communicator are registered one after the other, on all ranks in the same order.
        let _ = member.windows().signals.set(signals);
    }
    // SAFETY: `owner` frees memory of ncclMemAlloc. Other memory must stay until the communicator is destroyed, or all
    // ranks have deregistered it and registered another: docs/nccl.md documents this for callers.
    let registration = unsafe { device.register_owned(address, bytes, buffers::owner(address)) }?;
    log::info!(
        "communicator {}: {bytes} bytes at {address:#x} are a window, {}",
        member.name(),
        if registration.is_registered() { "used without copies" } else { "used like any other memory" }
    );
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    // Not an address that this process can have: callers hand it back, and no more.
    let number = NEXT.fetch_add(1, Ordering::Relaxed) << 12;
    all().insert(
        number,
        Arc::new(Window { member: identity(member), rank: device.rank(), address, bytes, registration }),
    );
    member.windows().numbers().push(number);
    Ok(number as *mut Opaque)
}

export! {
    /// Registers a buffer together with all ranks of the communicator, each with its own buffer. It waits for them; in
    /// a group, `ncclGroupEnd` does, and writes `*win`.
    fn ncclCommWindowRegister / pncclCommWindowRegister [comm] (
        comm: Handle, buff: *mut c_void, size: usize, win: *mut *mut Opaque, flags: c_int
    ) {
        group::noted((|| {
            // SAFETY: NULL or the caller's variable.
            let place = unsafe { out("win", win) }?;
            *place = std::ptr::null_mut();
            let member = handle(comm)?;
            if buff.is_null() || size == 0 {
                return Err(Fault::argument(format!("buff is {buff:p} of {size} bytes, expected memory of the GPU")));
            }
            if !(buff as usize).is_multiple_of(WIN_ALIGNMENT) {
                return Err(Fault::argument(format!(
                    "buff is {buff:p}, expected a multiple of {WIN_ALIGNMENT}: ncclMemAlloc gives such memory"
                )));
            }
            // All windows are symmetric and ordered here.
            log::debug!("ncclCommWindowRegister: flags {flags:#x}");
            member.device()?;
            let (address, place) = (buff as u64, win as usize);
            let run = move |member: &Arc<Member>| {
                let window = register(member, address, size)?;
                // SAFETY: the caller's variable, which must live until ncclGroupEnd.
                unsafe { (place as *mut *mut Opaque).write(window) };
                Ok(())
            };
            group::meet(&member, run, |_| ())
        })())
    }

    /// Ends a window, on this rank alone; NULL does nothing. The ranks must not use it any more.
    fn ncclCommWindowDeregister / pncclCommWindowDeregister [comm] (comm: Handle, win: *mut Opaque) {
        group::noted((|| {
            let member = handle(comm)?;
            if win.is_null() {
                return Ok(());
            }
            find_of(win, &member)?;
            member.windows().numbers().retain(|number| *number != win as usize);
            let window = all().remove(&(win as usize));
            // Outside of the lock.
            drop(window);
            Ok(())
        })())
    }

    /// Writes the address that `ncclCommWindowRegister` got; NULL for the NULL window of a communicator without
    /// windows.
    fn ncclWinGetUserPtr / pncclWinGetUserPtr [comm] (comm: Handle, win: *mut Opaque, pointer: *mut *mut c_void) {
        // SAFETY: NULL or the caller's variable.
        let pointer = unsafe { out("outUserPtr", pointer) }?;
        *pointer = std::ptr::null_mut();
        let member = handle(comm)?;
        if win.is_null() && !reaches(member.device()?) {
            return Ok(());
        }
        *pointer = find_of(win, &member)?.address as *mut c_void;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use crate::config::Options;

    #[test]
    fn a_window_that_does_not_exist_is_named() {
        let member = Arc::new(Member::starting(Options::standard(), 0, Some((0, 2))));
        for win in [std::ptr::null_mut(), 0x7000 as *mut Opaque] {
            let fault = find_of(win, &member).unwrap_err();
            assert_eq!(fault.status, Status::InvalidArgument);
            assert!(fault.text.contains("ncclCommWindowRegister"), "{}", fault.text);
        }
        let fault = member.windows().signals().unwrap_err();
        assert_eq!(fault.status, Status::InvalidUsage);
        assert!(fault.text.contains("ncclCommWindowRegister first"), "{}", fault.text);
    }
}
