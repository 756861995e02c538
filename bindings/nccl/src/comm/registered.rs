//! Buffers that all ranks of a communicator have registered together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tinynccl::cuda::{Registration, Signals};

use crate::abi::Window as Opaque;
use crate::abi::error::{Error, Result};

/// A registered buffer of a communicator.
#[derive(Debug)]
pub(crate) struct Window {
    /// Identity of the communicator.
    pub(crate) comm: usize,
    pub(crate) rank: usize,
    /// Address and length of our buffer.
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    pub(crate) registration: Registration,
}

impl Window {
    /// Returns the address at which our device reaches byte `offset` of `peer`'s buffer; `None` if it does not.
    ///
    /// # Errors
    /// `ncclInvalidArgument` beyond the window's end.
    pub(crate) fn address_at(&self, peer: usize, offset: usize) -> Result<Option<u64>> {
        let buffer =
            if peer == self.rank { Some((self.address, self.bytes as u64)) } else { self.registration.place(peer) };
        let Some((at, bytes)) = buffer else { return Ok(None) };
        if offset as u64 >= bytes {
            return Err(Error::argument(format!(
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
            Error::usage(
                "the communicator has no memory for signals yet: call ncclCommWindowRegister first, which makes it \
                 where the ranks reach each other's memory",
            )
        })
    }

    /// Makes the memory for signals, if there is none yet.
    pub(crate) fn ensure_signals(&self, make: impl FnOnce() -> Result<Signals>) -> Result<()> {
        if self.signals.get().is_none() {
            // Windows of a communicator are registered one after the other, on all ranks in the same order.
            let _ = self.signals.set(make()?);
        }
        Ok(())
    }

    /// Adds a window; returns the address that stands for it.
    pub(crate) fn add(&self, window: Window) -> *mut Opaque {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        // Not an address that this process can have: callers hand it back, and no more.
        let number = NEXT.fetch_add(1, Ordering::Relaxed) << 12;
        all().insert(number, Arc::new(window));
        self.numbers().push(number);
        number as *mut Opaque
    }

    /// Ends a window.
    pub(crate) fn remove(&self, win: *mut Opaque) {
        self.numbers().retain(|number| *number != win as usize);
        let window = all().remove(&(win as usize));
        // Outside of the lock.
        drop(window);
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

/// Returns the window that a caller names.
pub(crate) fn find(win: *mut Opaque) -> Result<Arc<Window>> {
    let found = all().get(&(win as usize)).cloned();
    found.ok_or_else(|| {
        Error::argument(format!(
            "window is {win:p}, expected one that ncclCommWindowRegister gave and that is not deregistered (it gives \
             NULL where the ranks do not reach each other's memory)"
        ))
    })
}
