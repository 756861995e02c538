//! A completion channel: the descriptor that wakes a sleeper when a completion has come.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::{Context, Handle, ffi};
use tinynccl_plan::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct Channel {
    raw: Handle<ffi::ibv_comp_channel>,
    _context: Arc<Context>,
}

impl Channel {
    /// A channel whose descriptor does not block.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Channel> {
        // SAFETY: the context is open.
        let raw = unsafe { ffi::ibv_create_comp_channel(context.raw()) };
        let raw = Handle::new(raw, || format!("creating a completion channel on {}", context.name()))?;
        let channel = Channel { raw, _context: context.clone() };
        rustix::fs::fcntl_getfl(&channel)
            .and_then(|flags| rustix::fs::fcntl_setfl(&channel, flags | rustix::fs::OFlags::NONBLOCK))
            .map_err(|e| Error::errno("verbs", "preparing a completion channel", e))?;
        Ok(channel)
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_comp_channel {
        self.raw.get()
    }

    /// Takes one event out; false when there is none. It must be acknowledged before the queue is destroyed.
    pub(super) fn take_event(&self) -> Result<bool> {
        let mut cq = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        // SAFETY: the channel is open; the call writes two pointers.
        match unsafe { ffi::ibv_get_cq_event(self.raw(), &raw mut cq, &raw mut context) } {
            0 => Ok(true),
            _ => match std::io::Error::last_os_error() {
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(false),
                e => Err(Error::io("verbs", "reading a completion event", &e)),
            },
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as the channel is.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).fd) }
    }
}
