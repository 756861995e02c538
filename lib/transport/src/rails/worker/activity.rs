//! State shared by all requests of a process and its workers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::rails::worker::thread::Worker;

/// Open requests of a process, and the workers that sleep meanwhile.
#[derive(Debug, Default)]
pub(in crate::rails) struct Activity {
    /// Open requests: the threads do not go to sleep while there are any, for some time.
    open: AtomicUsize,
    /// Workers that sleep all the same, for want of cores: a thread that tests a request for a short message drives
    /// their progress inline.
    sleepers: OnceLock<Vec<Weak<Worker>>>,
}

impl Activity {
    pub(in crate::rails) fn any(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
    }

    /// Counts one more open request.
    pub(in crate::rails) fn begin(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `requests` open requests as done.
    pub(in crate::rails) fn end(&self, requests: usize) {
        self.open.fetch_sub(requests, Ordering::Relaxed);
    }

    /// Sets the workers whose progress is driven inline. Called once, if the host has too few cores for threads that
    /// spin.
    pub(in crate::rails) fn set_sleepers(&self, workers: impl Iterator<Item = Weak<Worker>>) {
        let _ = self.sleepers.set(workers.collect());
    }

    /// Drives the progress of workers that sleep, on the caller's thread.
    pub(in crate::rails) fn drive_sleepers(&self) {
        self.sleepers().for_each(|worker| worker.drive_progress());
    }

    /// Has workers that sleep do their work themselves again.
    pub(in crate::rails) fn wake_sleepers(&self) {
        self.sleepers().for_each(|worker| worker.hand_back());
    }

    fn sleepers(&self) -> impl Iterator<Item = Arc<Worker>> {
        self.sleepers.get().into_iter().flatten().filter_map(Weak::upgrade)
    }
}
