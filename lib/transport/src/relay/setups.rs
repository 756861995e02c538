//! Making of what a process relays: a thread for each link or stream until its hops stand, then one thread for all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::{Thread, lock};

/// Most links or streams at once: the next hop answers when it likes.
const MOST: usize = 1024;

/// Relayed links or streams that are being made, and the forwarder `F` of those that stand, which is started with the
/// first.
#[derive(Debug)]
pub(crate) struct Setups<F> {
    threads: Mutex<Vec<Thread>>,
    forwarder: Mutex<Option<Arc<F>>>,
    stopped: AtomicBool,
}

impl<F> Setups<F> {
    pub(crate) fn new() -> Setups<F> {
        Setups { threads: Mutex::default(), forwarder: Mutex::default(), stopped: AtomicBool::new(false) }
    }

    /// Starts a thread called `name` that makes the next hop for `conn`; it does not block. `standing` counts those of
    /// the forwarder that share the limit.
    ///
    /// # Errors
    /// The connection, and the reason why nothing is relayed for it.
    pub(crate) fn start<C: Send + 'static>(
        &self,
        name: String,
        conn: C,
        standing: impl FnOnce(&F) -> usize,
        make: impl FnOnce(C) + Send + 'static,
    ) -> Result<(), (C, String)> {
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        let count = threads.len() + self.running().as_deref().map_or(0, standing);
        if self.is_stopped() {
            return Err((conn, "it is leaving".to_owned()));
        }
        if count >= MOST {
            return Err((conn, format!("it relays, or begins to relay, {count} others")));
        }
        match Thread::start("relay", name, "a thread that makes a hop".to_owned(), move || make(conn)) {
            Ok(thread) => threads.push(thread),
            // The connection is gone with the closure: the dialer comes again.
            Err(e) => log::warn!("{e}"),
        }
        Ok(())
    }

    /// The forwarder, if it has been started.
    pub(crate) fn running(&self) -> Option<Arc<F>> {
        lock(&self.forwarder).clone()
    }

    /// The forwarder, which `start` starts.
    ///
    /// # Errors
    /// Those of `start`.
    pub(crate) fn forwarder(&self, start: impl FnOnce() -> Result<F>) -> Result<Arc<F>> {
        let mut forwarder = lock(&self.forwarder);
        if let Some(running) = &*forwarder {
            return Ok(running.clone());
        }
        Ok(forwarder.insert(Arc::new(start()?)).clone())
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Returns the error that ends a wait of rank `rank`, once this is stopped.
    pub(crate) fn abort(&self, rank: usize) -> Option<Error> {
        let (op, reason) = ("relay".to_owned(), "it is leaving".to_owned());
        self.is_stopped().then_some(Error::Aborted { op, rank, reason })
    }

    /// Ends what is in the making, then the forwarder.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let threads = std::mem::take(&mut *lock(&self.threads));
        threads.iter().for_each(Thread::join);
        let forwarder = lock(&self.forwarder).take();
        // It may wait for its streams, without the lock.
        drop(forwarder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn what_is_being_made_and_what_stands_share_a_limit() {
        let setups = Setups::<usize>::new();
        assert_eq!(setups.running(), None);
        setups.forwarder(|| Ok(MOST - 1)).unwrap();
        assert_eq!(*setups.forwarder(|| Ok(0)).unwrap(), MOST - 1);
        let (go, wait) = mpsc::channel::<()>();
        setups.start("hop".to_owned(), wait, |n| *n, |wait| wait.recv().unwrap_or_default()).unwrap();
        let (conn, why) = setups.start("hop".to_owned(), 7, |n| *n, |_| ()).unwrap_err();
        assert!(conn == 7 && why.contains("1024 others"), "{why}");
        setups.start("hop".to_owned(), 7, |_| 0, |_| ()).unwrap();
        drop(go);
        setups.stop();
        assert_eq!(setups.running(), None);
        assert!(setups.start("hop".to_owned(), 7, |_| 0, |_| ()).unwrap_err().1.contains("leaving"));
        assert!(setups.abort(3).unwrap().to_string().contains("leaving"));
    }
}
