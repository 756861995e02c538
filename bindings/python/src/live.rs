//! The state of a `Comm` until it is closed, and the list of open ones for the end of the interpreter.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tinynccl::{Error, Result};

use crate::device::{Current, Gpu};

/// Longest wait, at the end of the interpreter, for the calls in flight of a communicator.
const LAST_CALLS: Duration = Duration::from_secs(30);

/// The parts of a communicator.
pub(crate) struct Live {
    gpu: Mutex<Option<Arc<Gpu>>>,
    pub(crate) comm: ManuallyDrop<tinynccl::Comm>,
    /// The process that created it; a forked child has no part in it.
    process: u32,
}

impl Live {
    /// A communicator that is open until it is taken out of its slot.
    pub(crate) fn open(comm: tinynccl::Comm) -> Arc<Slot> {
        let live = Live { gpu: Mutex::new(None), comm: ManuallyDrop::new(comm), process: std::process::id() };
        let slot: Arc<Slot> = Arc::new(Mutex::new(Some(Arc::new(live))));
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|slot| slot.strong_count() > 0);
        open.push(Arc::downgrade(&slot));
        slot
    }

    pub(crate) fn gpu(&self) -> MutexGuard<'_, Option<Arc<Gpu>>> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the communicator on a GPU, created by the first call that needs it.
    pub(crate) fn on(&self, ordinal: usize) -> Result<Arc<Gpu>> {
        let mut gpu = self.gpu();
        match &*gpu {
            Some(gpu) if gpu.ordinal() == ordinal => Ok(gpu.clone()),
            Some(gpu) => Err(Error::invalid(
                "device",
                format!(
                    "rank {}: the tensor is on cuda:{ordinal}, this communicator was first used on cuda:{}: a communicator has one \
                     GPU per rank",
                    self.comm.rank(),
                    gpu.ordinal()
                ),
            )),
            None => Ok(gpu.insert(Arc::new(Gpu::new(&self.comm, ordinal)?)).clone()),
        }
    }

    pub(crate) fn abort(&self, reason: &str) {
        self.comm.abort(reason);
        self.abort_gpu();
    }

    /// Ends calls on every rank, also on those that have not noticed a failure.
    pub(crate) fn revoke(&self) -> Result<()> {
        let revoked = self.comm.revoke();
        self.abort_gpu();
        revoked
    }

    fn abort_gpu(&self) {
        // Not while another thread is making it; that one fails with the communicator.
        if let Ok(gpu) = self.gpu.try_lock()
            && let Some(gpu) = &*gpu
        {
            gpu.abort();
        }
    }
}

impl Live {
    /// Waits until no call is in flight, for a while; false when some remain, or a signal's handler raised.
    fn settles(&self) -> bool {
        let deadline = Instant::now() + LAST_CALLS.min(self.comm.config().timeout);
        let mut asked = Instant::now();
        while self.process == std::process::id() && !self.comm.is_idle() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
            if asked.elapsed() > Duration::from_millis(50) {
                asked = Instant::now();
                if Python::try_attach(|py| py.check_signals().is_err()) == Some(true) {
                    return false;
                }
            }
        }
        true
    }

    /// The end, called once.
    fn leave(&mut self) {
        if let Some(gpu) = self.gpu().take() {
            let _current = Current::keep();
            drop(gpu);
        }
        // SAFETY: `drop` alone calls this, and once.
        unsafe { ManuallyDrop::drop(&mut self.comm) };
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // Leaving waits for calls in flight, whose end may need the interpreter's lock.
        let mut live = Some(self);
        let mut leave = || live.take().map_or((), Live::leave);
        if Python::try_attach(|py| py.detach(&mut leave)).is_none() {
            leave();
        }
    }
}

/// A communicator until it is closed.
pub(crate) type Slot = Mutex<Option<Arc<Live>>>;

/// Slots of this process's communicators that may still be open.
static OPEN: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

pub(crate) fn take(slot: &Slot) -> Option<Arc<Live>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Leaves all communicators at the end of the interpreter. Calls in flight, for which no one waits any more, get a while
/// to end: other ranks are in them, too.
#[pyfunction]
pub(crate) fn _leave_all(py: Python<'_>) {
    let slots = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    py.detach(|| {
        // The newest first: communicators of splits and of pairs of ranks go before their parents.
        for live in slots.iter().rev().filter_map(Weak::upgrade).filter_map(|slot| take(&slot)) {
            if !live.settles() {
                live.abort("the interpreter exits with calls in flight");
            }
        }
    });
}
