//! Links that are dropped while something is still to be done for what was sent on them: the endpoint's thread sees to
//! it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;

/// A dropped link's rest.
pub(crate) trait Closing: Send + fmt::Debug {
    /// Readable when there may be something to do.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Does what can be done without blocking; true when nothing is left, or the time is over.
    fn is_done(&mut self) -> bool;

    /// The kernel does not go on with it when the process ends.
    fn needs_this_process(&self) -> bool {
        false
    }
}

/// Work that dropped links leave behind, until the endpoint's thread collects it.
#[derive(Debug)]
pub(crate) struct Linger {
    /// `None` once no thread collects any more.
    left: Mutex<Option<Vec<Box<dyn Closing>>>>,
    bell: Arc<Doorbell>,
    /// The process whose thread collects.
    pub(crate) origin: Origin,
}

impl Linger {
    /// `bell` wakes the thread that collects.
    pub(crate) fn new(bell: Arc<Doorbell>) -> Arc<Linger> {
        Arc::new(Linger { left: Mutex::new(Some(Vec::new())), bell, origin: Origin::here() })
    }

    /// Leaves something behind; it is dropped at once when no thread collects any more.
    pub(crate) fn take(&self, closing: Box<dyn Closing>) {
        if !self.origin.is_here() {
            // Its parent's connection is none of a child's, and there is no thread to collect.
            return drop(closing);
        }
        if let Some(left) = &mut *lock(&self.left) {
            left.push(closing);
            self.bell.ring();
        }
    }

    /// Takes the work that was left behind since the last call.
    pub(crate) fn collect(&self) -> Vec<Box<dyn Closing>> {
        lock(&self.left).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Keeps nothing from now on. Returns what came since the last [`Linger::collect`].
    pub(crate) fn stop(&self) -> Vec<Box<dyn Closing>> {
        lock(&self.left).take().unwrap_or_default()
    }
}
