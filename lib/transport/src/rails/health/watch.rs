//! Connections that a thread looks at until they end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::rails::connection::Connection;
use tinynccl_plan::error::Result;
use tinynccl_sys::threads::{Thread, lock};

/// Longest wait with nothing to do.
const IDLE: Duration = Duration::from_secs(3600);

/// A watched connection, and what its thread knows of it.
#[derive(Debug)]
pub(in crate::rails) struct Watched<T> {
    pub(in crate::rails) connection: Weak<Connection>,
    pub(in crate::rails) state: T,
}

/// The connections that a thread watches, and the thread, which starts with the first one.
#[derive(Debug)]
pub(in crate::rails) struct Watch<T> {
    list: Arc<WatchList<T>>,
    thread: Mutex<Option<Thread>>,
}

/// Connections that the thread watches.
#[derive(Debug)]
pub(in crate::rails) struct WatchList<T> {
    watched: Mutex<Vec<Watched<T>>>,
    changed: Condvar,
    stop: AtomicBool,
}

impl<T> Default for Watch<T> {
    fn default() -> Self {
        let (watched, changed, stop) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        Watch { list: Arc::new(WatchList { watched, changed, stop }), thread: Mutex::default() }
    }
}

impl<T> Watch<T> {
    /// Watches a new connection until it ends. The first time `start` starts the thread.
    pub(in crate::rails) fn add(
        &self,
        connection: &Arc<Connection>,
        state: T,
        start: impl FnOnce(Arc<WatchList<T>>) -> Result<Thread>,
    ) -> Result<()> {
        lock(&self.list.watched).push(Watched { connection: Arc::downgrade(connection), state });
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            *thread = Some(start(self.list.clone())?);
        }
        self.list.changed.notify_all();
        Ok(())
    }

    /// Ends the thread.
    pub(in crate::rails) fn stop(&self) {
        {
            // With the lock: a thread that has just checked sees it, or waits already.
            let _watched = lock(&self.list.watched);
            self.list.stop.store(true, Ordering::Release);
        }
        self.list.changed.notify_all();
        let thread = lock(&self.thread).take();
        drop(thread);
    }
}

impl<T> WatchList<T> {
    pub(in crate::rails) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits for `time`, or for [`IDLE`] while nothing is watched; returns the connections that are.
    pub(in crate::rails) fn wait(&self, time: Duration) -> MutexGuard<'_, Vec<Watched<T>>> {
        let mut watched = lock(&self.watched);
        if !self.is_stopped() {
            let time = if watched.is_empty() { IDLE } else { time };
            watched = self.changed.wait_timeout(watched, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        watched.retain(|w| w.connection.upgrade().is_some_and(|connection| !connection.is_over()));
        watched
    }
}
