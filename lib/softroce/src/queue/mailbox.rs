//! A queue with a file descriptor that is readable while there is something in it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::fork::{Origin, Own};
use crate::sync::lock;

/// Programs wait for the descriptor by `poll` beside others, and may set it non-blocking. It is written to with the first
/// entry and read with the last one, both under the lock, so a read of it never waits.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    fd: Own<OwnedFd>,
    queue: Mutex<VecDeque<T>>,
    origin: Origin,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Result<Mailbox<T>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Error::system("opening an eventfd", &e.into()))?;
        Ok(Mailbox { fd: Own::new(fd), queue: Mutex::default(), origin: Origin::here() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn push(&self, entry: T) {
        let mut queue = lock(&self.queue);
        queue.push_back(entry);
        if queue.len() == 1 {
            // It has room: the count was 0.
            let _ = rustix::io::write(&*self.fd, &1u64.to_ne_bytes());
        }
    }

    /// The oldest entry. Waits for one, unless the program set the descriptor non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` where there is none and the descriptor does not block, `EINVAL` in a forked child.
    pub(crate) fn pop(&self) -> Result<T> {
        let fail = |e: Errno| Error::system("waiting for an event", &e.into());
        loop {
            self.origin.check()?;
            let mut queue = lock(&self.queue);
            if let Some(entry) = queue.pop_front() {
                self.taken(&queue);
                return Ok(entry);
            }
            drop(queue);
            if fcntl_getfl(&*self.fd).map_err(fail)?.contains(OFlags::NONBLOCK) {
                return Err(fail(Errno::AGAIN));
            }
            match poll(&mut [PollFd::new(&*self.fd, PollFlags::IN)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(fail(e)),
            }
        }
    }

    /// Takes out the entries for which `keep` is false.
    pub(crate) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        let mut queue = lock(&self.queue);
        if !queue.is_empty() {
            queue.retain(keep);
            self.taken(&queue);
        }
    }

    /// Clears the descriptor if the last entry was taken out.
    fn taken(&self, queue: &MutexGuard<'_, VecDeque<T>>) {
        if queue.is_empty() {
            let _ = rustix::io::read(&*self.fd, &mut [0; 8]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(mailbox: &Mailbox<u8>) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(mailbox.fd(), PollFlags::IN)];
        poll(&mut fds, Some(&rustix::time::Timespec::default())).expect("poll") == 1
    }

    #[test]
    fn the_descriptor_is_readable_while_there_is_an_entry() {
        let mailbox = Mailbox::new().expect("eventfd");
        let all = |mailbox: &Mailbox<u8>| (0..4).for_each(|n| mailbox.push(n));
        assert!(!readable(&mailbox));
        all(&mailbox);
        assert_eq!((mailbox.pop(), readable(&mailbox)), (Ok(0), true));
        mailbox.retain(|n| *n == 2);
        assert!(readable(&mailbox), "one is left");
        mailbox.retain(|_| false);
        assert!(!readable(&mailbox), "nothing is left");
        mailbox.retain(|_| false);
        all(&mailbox);
        assert_eq!([mailbox.pop(), mailbox.pop(), mailbox.pop(), mailbox.pop()], [Ok(0), Ok(1), Ok(2), Ok(3)]);
        assert!(!readable(&mailbox));
        rustix::fs::fcntl_setfl(mailbox.fd(), OFlags::NONBLOCK).expect("set");
        assert_eq!(mailbox.pop().map_err(|e| e.errno()), Err(libc::EAGAIN));
    }
}
