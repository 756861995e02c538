//! A doorbell: one eventfd per communicator, rung by any thread or process that has something for it, polled by the
//! thread that sleeps.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use tinynccl_plan::error::{Error, Result};

/// A non-blocking eventfd. Any thread rings it, and any process that was handed a duplicate of the descriptor.
///
/// Rings add up until [`Doorbell::drain`]: a ring before the sleeper polls is not lost.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
    #[cfg(loom)]
    model: crate::sync::Bell,
}

impl Doorbell {
    /// A new doorbell, silent.
    ///
    /// # Errors
    /// [`Error::Os`] when the process is out of descriptors.
    pub fn new() -> Result<Arc<Doorbell>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::errno("doorbell", "creating an eventfd", e))?;
        Ok(Doorbell::from_fd(fd))
    }

    /// A doorbell which another process created.
    pub fn from_fd(fd: OwnedFd) -> Arc<Doorbell> {
        Arc::new(Doorbell {
            fd,
            #[cfg(loom)]
            model: crate::sync::Bell::new(),
        })
    }

    /// Wakes the sleeper, now or when it polls next. Costs one system call, about 0.2 µs, and several when it really
    /// wakes a thread.
    pub fn ring(&self) {
        #[cfg(loom)]
        self.model.ring();
        // Fails only when the counter is full (2^64 - 2 rings): then the descriptor is readable anyway.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// The descriptor to poll for readability.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Sleeps until it is rung.
    #[cfg(loom)]
    pub fn wait(&self) {
        self.model.wait();
    }

    /// Forgets all rings so far. Look at the links again *after* this.
    pub fn drain(&self) {
        self.was_rung();
    }

    /// [`Doorbell::drain`]; returns true if there was a ring.
    pub fn was_rung(&self) -> bool {
        #[cfg(loom)]
        self.model.drain();
        let mut count = [0u8; 8];
        rustix::io::read(&self.fd, &mut count).is_ok()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::poll;
    use rustix::event::{PollFd, PollFlags};
    use std::time::Duration;

    fn rung(bell: &Doorbell) -> bool {
        poll(&mut [PollFd::new(bell, PollFlags::IN)], Duration::ZERO).unwrap() == 1
    }

    #[test]
    fn rings_stay_until_drained() {
        let bell = Doorbell::new().unwrap();
        assert!(!rung(&bell));
        bell.ring();
        bell.ring();
        assert!(rung(&bell) && rung(&bell));
        bell.drain();
        assert!(!rung(&bell));
        bell.drain();
    }
}
