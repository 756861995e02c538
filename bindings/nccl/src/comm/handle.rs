//! The target of an `ncclComm_t`.
//!
//! A handle points to a small slot that is never freed, so that a call after `ncclCommDestroy` is an error with a text
//! and not a crash. The [`Communicator`] in it is freed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::communicator::Communicator;
use crate::abi::error::{Error, Result};
use crate::abi::export::ErrorOwner;

/// `ncclComm_t`.
pub(crate) type Handle = *mut Slot;

const MAGIC: u64 = u64::from_le_bytes(*b"tinynccl");

/// The memory behind a handle.
pub(crate) struct Slot {
    magic: AtomicU64,
    /// `None` once it is destroyed.
    comm: RwLock<Option<Arc<Communicator>>>,
}

/// Makes a handle of `comm`, to be given to the caller.
pub(crate) fn new(comm: Arc<Communicator>) -> Handle {
    Box::into_raw(Box::new(Slot { magic: AtomicU64::new(MAGIC), comm: RwLock::new(Some(comm)) }))
}

fn slot<'a>(comm: Handle) -> Result<&'a Slot> {
    if comm.is_null() {
        return Err(Error::argument("comm is NULL"));
    }
    if !comm.is_aligned() {
        return Err(Error::argument(format!("comm is {comm:p}, which no function of this library returned")));
    }
    // SAFETY: callers pass what `new` returned, whose memory is never freed. The magic rejects any other pointer that
    // is readable; an unreadable one faults here as it does in NCCL.
    let slot = unsafe { &*comm };
    if slot.magic.load(Ordering::Relaxed) != MAGIC {
        return Err(Error::argument(format!("comm is {comm:p}, which no function of this library returned")));
    }
    Ok(slot)
}

/// Returns the communicator of a handle.
///
/// # Errors
/// `ncclInvalidArgument` for NULL, for a pointer that is none, and after destroy or abort.
pub(crate) fn handle(comm: Handle) -> Result<Arc<Communicator>> {
    let comm = slot(comm)?.comm.read().unwrap_or_else(PoisonError::into_inner);
    comm.clone().ok_or_else(|| {
        Error::argument("the communicator has been destroyed or aborted: use it no more, and make a new one")
    })
}

/// Returns the communicator of a handle, if there is one.
pub(crate) fn find(comm: Handle) -> Option<Arc<Communicator>> {
    if comm.is_null() { None } else { handle(comm).ok() }
}

/// Takes the communicator out of its handle, which names none from now on.
pub(crate) fn take(comm: Handle) -> Result<Arc<Communicator>> {
    let comm = slot(comm)?.comm.write().unwrap_or_else(PoisonError::into_inner).take();
    comm.ok_or_else(|| Error::argument("the communicator has been destroyed or aborted already"))
}

impl ErrorOwner for Handle {
    fn keep_error(&self, text: &str) {
        if let Some(comm) = find(*self) {
            comm.keep_error(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;

    #[test]
    fn a_handle_that_names_nothing_is_an_error() {
        let comm = Arc::new(Communicator::starting(crate::abi::config::Options::standard(), 0, Some((1, 3))));
        let named = new(comm.clone());
        assert!(Arc::ptr_eq(&handle(named).unwrap(), &comm));
        assert!(Arc::ptr_eq(&take(named).unwrap(), &comm));
        for outcome in [handle(named), take(named), handle(std::ptr::null_mut()), handle(named.wrapping_byte_add(1))] {
            assert_eq!(outcome.err().unwrap().status, Status::InvalidArgument);
        }
        let mut other = [0u64; 8];
        assert!(handle(other.as_mut_ptr().cast()).is_err());
    }
}
