//! A queue with a file descriptor that is readable while there is something in it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::sync::lock;

/// The descriptor counts the entries (a semaphore of `eventfd(2)`): programs wait for it by `poll` beside others, and
/// may set it non-blocking.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    fd: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Result<Mailbox<T>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)
            .map_err(|e| Error::system("opening an eventfd", &e.into()))?;
        Ok(Mailbox { fd, queue: Mutex::default() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn push(&self, entry: T) {
        lock(&self.queue).push_back(entry);
        // It fails only at 2^64 - 1 entries.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// The oldest entry. Waits for one, unless the program set the descriptor non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` where there is none and the descriptor does not block.
    pub(crate) fn pop(&self) -> Result<T> {
        loop {
            let mut count = [0; 8];
            match rustix::io::read(&self.fd, &mut count) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(e) => return Err(Error::system("waiting for an event", &e.into())),
            }
            // None where `retain` took the entry whose count this was.
            if let Some(entry) = lock(&self.queue).pop_front() {
                return Ok(entry);
            }
        }
    }

    /// Takes out the entries for which `keep` is false.
    pub(crate) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        lock(&self.queue).retain(keep);
    }
}
