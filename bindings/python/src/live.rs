//! The state of a `Comm` until it is closed, and the list of open ones for the end of the interpreter.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;
use tinynccl::{Error, Result};

use crate::device::{Current, Gpu};

/// The parts of a communicator, in the order in which they are dropped.
pub(crate) struct Live {
    gpu: Mutex<Option<Arc<Gpu>>>,
    pub(crate) comm: tinynccl::Comm,
}

impl Live {
    /// A communicator that is open until it is taken out of its slot.
    pub(crate) fn open(comm: tinynccl::Comm) -> Arc<Slot> {
        let live = Live { gpu: Mutex::new(None), comm };
        let slot: Arc<Slot> = Arc::new(Mutex::new(Some(Arc::new(live))));
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|slot| slot.strong_count() > 0);
        open.push(Arc::downgrade(&slot));
        slot
    }

    pub(crate) fn gpu(&self) -> MutexGuard<'_, Option<Arc<Gpu>>> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator on a GPU, made by the first call that needs it.
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
        // Not while another thread is making it; that one fails with the communicator.
        if let Ok(gpu) = self.gpu.try_lock()
            && let Some(gpu) = &*gpu
        {
            gpu.abort();
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(gpu) = self.gpu().take() {
            let _current = Current::keep();
            drop(gpu);
        }
    }
}

/// A communicator until it is closed.
pub(crate) type Slot = Mutex<Option<Arc<Live>>>;

/// Those of this process that may still be open.
static OPEN: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

pub(crate) fn take(slot: &Slot) -> Option<Arc<Live>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Leaves all communicators at the end of the interpreter, when no one waits for calls in flight any more.
#[pyfunction]
pub(crate) fn _leave_all(py: Python<'_>) {
    let slots = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    py.detach(|| {
        // The newest first: communicators of splits and of pairs of ranks go before their parents.
        for live in slots.iter().rev().filter_map(Weak::upgrade).filter_map(|slot| take(&slot)) {
            if !live.comm.is_idle() {
                live.abort("the interpreter exits with calls in flight");
            }
        }
    });
}
