//! A completion channel: a file descriptor that becomes readable when a completion queue raises an event.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::{Context, complain, ffi};

/// A completion channel (`struct ibv_comp_channel`). Its descriptor never blocks; [`Channel::wait`] enforces a
/// deadline.
#[derive(Debug)]
pub struct Channel {
    raw: NonNull<ffi::ibv_comp_channel>,
    /// Freed after `drop` has run.
    _context: Arc<Context>,
}

// SAFETY: libibverbs allows every call from every thread; the pointer is freed once, in `drop`.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    /// A new channel on a device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Channel>> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { ffi::ibv_create_comp_channel(context.raw()) })
            .ok_or_else(|| anyhow!("ibv_create_comp_channel({}): {}", context.name(), io::Error::last_os_error()))?;
        let channel = Channel { raw, _context: Arc::clone(context) };
        let flags = fcntl_getfl(channel.fd()).context("completion channel")?;
        fcntl_setfl(channel.fd(), flags | OFlags::NONBLOCK).context("completion channel")?;
        Ok(Arc::new(channel))
    }

    /// The pointer for calls of libibverbs; valid while `self` is.
    pub fn raw(&self) -> *mut ffi::ibv_comp_channel {
        self.raw.as_ptr()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open as long as the channel, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// Sleeps until an event arrives and takes it. Returns false when `deadline` passes first.
    pub fn wait(&self, deadline: Instant) -> Result<bool> {
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is open and both places outlive the call. It does not block (O_NONBLOCK).
            if unsafe { ffi::ibv_get_cq_event(self.raw(), &mut cq, &mut context) } == 0 {
                // An unacknowledged event would make ibv_destroy_cq wait forever.
                // SAFETY: `cq` is the queue named by the event; its owner holds this channel, so it still exists.
                unsafe { ffi::ibv_ack_cq_events(cq, 1) };
                return Ok(true);
            }
            let cause = io::Error::last_os_error();
            if !matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                return Err(cause).context("ibv_get_cq_event");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let timeout = Timespec::try_from(left.min(Duration::from_secs(3600))).context("completion channel")?;
            match poll(&mut [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)], Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e).context("completion channel: poll"),
            }
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once; its CQs held an `Arc` and are gone.
        complain("ibv_destroy_comp_channel", unsafe { ffi::ibv_destroy_comp_channel(self.raw()) });
    }
}
