//! A call in flight, or its end.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tinynccl::{Error, Result};

use crate::comm::Live;
use crate::errors::raise;
use crate::memory::Memory;

/// Longest wait before the interpreter's signals are looked at.
const SLICE: Duration = Duration::from_millis(50);

/// A call in flight, which keeps its memory alive. Dropping it is fine: the call goes on.
#[pyclass(frozen, module = "tinynccl._core")]
pub(crate) struct Work {
    shared: Arc<Shared>,
    /// Ended when a signal ends the wait.
    comm: Weak<Live>,
    op: &'static str,
    rank: usize,
}

/// What the progress thread and the waiter share.
pub(crate) struct Shared {
    outcome: Mutex<Outcome>,
    done: Condvar,
    /// Freed with the last handle.
    _keep: Vec<Memory>,
}

#[derive(Default)]
struct Outcome {
    result: Option<Result<()>>,
    callbacks: Vec<Py<PyAny>>,
}

fn lock(mutex: &Mutex<Outcome>) -> MutexGuard<'_, Outcome> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(keep: Vec<Memory>) -> Arc<Shared> {
        Arc::new(Shared { outcome: Mutex::default(), done: Condvar::new(), _keep: keep })
    }

    /// Called once, by the thread that ran the call.
    pub(crate) fn complete(&self, result: Result<()>) {
        let callbacks = {
            let mut outcome = lock(&self.outcome);
            outcome.result = Some(result);
            std::mem::take(&mut outcome.callbacks)
        };
        self.done.notify_all();
        if callbacks.is_empty() {
            return;
        }
        // None at the very end of the interpreter, when nobody waits any more.
        let called = Python::try_attach(|py| {
            for callback in callbacks {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            }
        });
        if called.is_none() {
            log::debug!("the interpreter has ended before a call was complete");
        }
    }

    /// The result, once it is there; `None` when `deadline` comes before.
    fn wait_until(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        let mut outcome = lock(&self.outcome);
        loop {
            if let Some(result) = &outcome.result {
                return Some(result.clone());
            }
            outcome = match deadline {
                None => self.done.wait(outcome).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.done.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl Work {
    pub(crate) fn new(shared: Arc<Shared>, comm: &Arc<Live>, op: &'static str, rank: usize) -> Work {
        Work { shared, comm: Arc::downgrade(comm), op, rank }
    }

    /// Waits, looking at signals in between; a handler that raises aborts the communicator.
    pub(crate) fn finish(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        let end = timeout.map(|t| Instant::now() + t);
        loop {
            let slice = Instant::now() + SLICE;
            let until = end.map_or(slice, |end| end.min(slice));
            match py.detach(|| self.shared.wait_until(Some(until))) {
                Some(Ok(())) => return Ok(()),
                Some(Err(error)) => return Err(raise(py, &error)),
                None => {}
            }
            if let Err(raised) = py.check_signals() {
                if let Some(live) = self.comm.upgrade() {
                    py.detach(|| live.abort("interrupted"));
                }
                return Err(raised);
            }
            if let (Some(end), Some(timeout)) = (end, timeout)
                && Instant::now() >= end
            {
                let error = Error::Timeout {
                    op: self.op.to_owned(),
                    rank: self.rank,
                    waited: timeout,
                    missing: Vec::new(),
                    detail: "the call is still in flight; its own deadline is that of the communicator (timeout=)"
                        .to_owned(),
                };
                return Err(raise(py, &error));
            }
        }
    }
}

#[pymethods]
impl Work {
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.filter(|t| *t > 0.0).and_then(|t| Duration::try_from_secs_f64(t).ok());
        self.finish(py, timeout).map(|()| true)
    }

    fn is_completed(&self) -> bool {
        lock(&self.shared.outcome).result.is_some()
    }

    fn exception(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        match &lock(&self.shared.outcome).result {
            Some(Err(error)) => Some(raise(py, error).into_value(py).into_any()),
            _ => None,
        }
    }

    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        {
            let mut outcome = lock(&self.shared.outcome);
            if outcome.result.is_none() {
                outcome.callbacks.push(callback);
                return Ok(());
            }
        }
        callback.call0(py).map(drop)
    }

    fn __repr__(&self) -> String {
        let state = match &lock(&self.shared.outcome).result {
            None => "in flight",
            Some(Ok(())) => "complete",
            Some(Err(_)) => "failed",
        };
        format!("<tinynccl.Work: {} of rank {}, {state}>", self.op, self.rank)
    }
}
