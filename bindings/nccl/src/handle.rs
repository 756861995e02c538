//! The target of an `ncclComm_t`.
//!
//! A small shell that is never freed, so that a call after `ncclCommDestroy` is an error with a text and not a crash,
//! around the [`Member`], which is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::fault::{Fault, Result};
use crate::member::Member;

/// `ncclComm_t`.
pub(crate) type Handle = *mut Shell;

const MAGIC: u64 = u64::from_le_bytes(*b"tinynccl");

/// The memory behind a handle.
pub(crate) struct Shell {
    magic: AtomicU64,
    /// `None` once it is destroyed.
    member: RwLock<Option<Arc<Member>>>,
}

/// A handle of `member`, to be given to the caller.
pub(crate) fn new(member: Arc<Member>) -> Handle {
    Box::into_raw(Box::new(Shell { magic: AtomicU64::new(MAGIC), member: RwLock::new(Some(member)) }))
}

fn shell<'a>(comm: Handle) -> Result<&'a Shell> {
    if comm.is_null() {
        return Err(Fault::argument("comm is NULL"));
    }
    if !comm.is_aligned() {
        return Err(Fault::argument(format!("comm is {comm:p}, which no function of this library returned")));
    }
    // SAFETY: callers pass what `new` returned, whose memory is never freed. The magic rejects any other pointer that
    // is readable; an unreadable one faults here as it does in NCCL.
    let shell = unsafe { &*comm };
    if shell.magic.load(Ordering::Relaxed) != MAGIC {
        return Err(Fault::argument(format!("comm is {comm:p}, which no function of this library returned")));
    }
    Ok(shell)
}

/// The communicator of a handle.
///
/// # Errors
/// `ncclInvalidArgument` for NULL, for a pointer that is none, and after destroy or abort.
pub(crate) fn handle(comm: Handle) -> Result<Arc<Member>> {
    let member = shell(comm)?.member.read().unwrap_or_else(PoisonError::into_inner);
    member.clone().ok_or_else(|| {
        Fault::argument("the communicator has been destroyed or aborted: use it no more, and make a new one")
    })
}

/// [`handle`] where there may be none.
pub(crate) fn find(comm: Handle) -> Option<Arc<Member>> {
    if comm.is_null() { None } else { handle(comm).ok() }
}

/// Takes the communicator out of its handle, which names none from now on.
pub(crate) fn take(comm: Handle) -> Result<Arc<Member>> {
    let member = shell(comm)?.member.write().unwrap_or_else(PoisonError::into_inner).take();
    member.ok_or_else(|| Fault::argument("the communicator has been destroyed or aborted already"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;

    #[test]
    fn a_handle_that_names_nothing_is_an_error() {
        let member = Arc::new(Member::starting(crate::config::Options::standard(), 0, Some((1, 3))));
        let comm = new(member.clone());
        assert!(Arc::ptr_eq(&handle(comm).unwrap(), &member));
        assert!(Arc::ptr_eq(&take(comm).unwrap(), &member));
        for outcome in [handle(comm), take(comm), handle(std::ptr::null_mut()), handle(comm.wrapping_byte_add(1))] {
            assert_eq!(outcome.err().unwrap().status, Status::InvalidArgument);
        }
        let mut other = [0u64; 8];
        assert!(handle(other.as_mut_ptr().cast()).is_err());
    }
}
