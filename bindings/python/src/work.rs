//! A call in flight, or its end.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use tinynccl::comm::{After, Queued};
use tinynccl::{Error, Result};

use crate::errors::{Names, after_call, not_inside, raise, waiting};
use crate::live::Live;
use crate::memory::Memory;

/// Longest wait between two checks for signals of the interpreter.
const SLICE: Duration = Duration::from_millis(50);

/// A call in flight, which keeps its memory alive. If it is dropped, the call continues.
#[pyclass(frozen, module = "tinynccl._core")]
pub(crate) struct Work {
    shared: Arc<Shared>,
    /// Its position in the communicator's queue of calls; `None` for a call that was complete at once.
    queued: Option<Queued>,
    /// Ended when a signal ends the wait.
    comm: Weak<Live>,
    op: &'static str,
    rank: usize,
}

/// State that the progress thread and the waiter share.
pub(crate) struct Shared {
    outcome: Mutex<Outcome>,
    done: Condvar,
    names: Names,
    /// Freed with the last handle.
    _keep: Vec<Memory>,
}

#[derive(Default)]
struct Outcome {
    result: Option<Result<()>>,
    /// Threads that sleep until it is there.
    sleeping: usize,
    callbacks: Vec<Callback>,
}

/// A receiver of the call's end.
enum Callback {
    Function(Py<PyAny>),
    /// A future of torch, and its result.
    Future {
        future: Py<PyAny>,
        result: Py<PyAny>,
    },
}

impl Callback {
    fn tell(&self, py: Python<'_>, names: &Names, outcome: Option<&Error>) -> PyResult<()> {
        match self {
            Callback::Function(function) => function.call0(py).map(drop),
            Callback::Future { future, result } => match outcome {
                None => future.call_method1(py, intern!(py, "set_result"), (result,)),
                Some(error) => {
                    future.call_method1(py, intern!(py, "set_exception"), (raise(py, names, error).into_value(py),))
                }
            }
            .map(drop),
        }
    }

    fn object(&self) -> &Py<PyAny> {
        match self {
            Callback::Function(object) | Callback::Future { future: object, .. } => object,
        }
    }
}

fn lock(mutex: &Mutex<Outcome>) -> MutexGuard<'_, Outcome> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(keep: Vec<Memory>, names: &Names) -> Arc<Shared> {
        Arc::new(Shared { outcome: Mutex::default(), done: Condvar::new(), names: names.clone(), _keep: keep })
    }

    /// Called once, by the thread that ran the call; gives the callbacks, which are for later.
    pub(crate) fn complete(&self, result: Result<()>) -> After {
        let mut outcome = lock(&self.outcome);
        let error = result.as_ref().err().cloned();
        outcome.result = Some(result);
        if outcome.sleeping > 0 {
            self.done.notify_all();
        }
        let callbacks = std::mem::take(&mut outcome.callbacks);
        if callbacks.is_empty() {
            return None;
        }
        let names = self.names.clone();
        Some(Box::new(move || after_call(|| tell(callbacks, &names, error))))
    }

    fn result(&self) -> Option<Result<()>> {
        lock(&self.outcome).result.clone()
    }

    /// The result, once it is there; `None` when `deadline` comes before.
    fn wait_until(&self, deadline: Instant) -> Option<Result<()>> {
        let mut outcome = lock(&self.outcome);
        outcome.sleeping += 1;
        while outcome.result.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            outcome = self.done.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        outcome.sleeping -= 1;
        outcome.result.clone()
    }
}

thread_local! {
    /// True while this thread runs callbacks of a call that has ended.
    static TELLING: Cell<bool> = const { Cell::new(false) };
}

/// Returns true while this thread runs a callback of ours. A callback may wait for a call in ways that we do not see,
/// and there might be no other thread to run that call. So a call made in a callback runs at once, in this thread.
pub(crate) fn telling() -> bool {
    TELLING.get()
}

fn tell(callbacks: Vec<Callback>, names: &Names, outcome: Option<Error>) {
    let before = TELLING.replace(true);
    // None at the very end of the interpreter, when no thread waits any more.
    let called = Python::try_attach(|py| {
        for callback in callbacks {
            if let Err(error) = callback.tell(py, names, outcome.as_ref()) {
                error.write_unraisable(py, Some(callback.object().bind(py)));
            }
        }
    });
    TELLING.set(before);
    if called.is_none() {
        log::debug!("the interpreter has ended before a call was complete");
    }
}

impl Work {
    pub(crate) fn in_flight(
        shared: Arc<Shared>,
        queued: Queued,
        comm: &Arc<Live>,
        op: &'static str,
        rank: usize,
    ) -> Work {
        Work { shared, queued: Some(queued), comm: Arc::downgrade(comm), op, rank }
    }

    pub(crate) fn complete(shared: Arc<Shared>, comm: &Arc<Live>, op: &'static str, rank: usize) -> Work {
        Work { shared, queued: None, comm: Arc::downgrade(comm), op, rank }
    }

    pub(crate) fn is_over(&self) -> bool {
        lock(&self.shared.outcome).result.is_some()
    }

    /// Starts the call for a caller that does not wait: it no longer stays queued for a waiter.
    fn start(&self) {
        if let Some(queued) = &self.queued {
            queued.start();
        }
    }

    fn at_end(&self, py: Python<'_>, callback: Callback) -> PyResult<()> {
        let error = {
            let mut outcome = lock(&self.shared.outcome);
            match &outcome.result {
                None => {
                    outcome.callbacks.push(callback);
                    drop(outcome);
                    self.start();
                    return Ok(());
                }
                Some(result) => result.as_ref().err().cloned(),
            }
        };
        callback.tell(py, &self.shared.names, error.as_ref())
    }

    /// Waits, and checks for signals in between; a handler that raises aborts the communicator. Without a timeout of
    /// its own the wait runs a still-queued call itself.
    pub(crate) fn finish(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        if !self.is_over() {
            not_inside(py, self.op, self.rank)?;
        }
        if timeout.is_some() {
            self.start();
        }
        // None, too, for one beyond all instants.
        let end = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let slice = Instant::now() + SLICE;
            let until = end.map_or(slice, |end| end.min(slice));
            if let (Some(queued), None) = (&self.queued, timeout) {
                // Queued behind a call that ran elsewhere, this one may still be unclaimed.
                waiting(py, self.op, &self.shared.names, || queued.help())?;
            }
            if let Some(result) = self.shared.result() {
                return result.map_err(|error| self.raise(py, &error));
            }
            match py.detach(|| self.shared.wait_until(until)) {
                Some(Ok(())) => return Ok(()),
                Some(Err(error)) => return Err(self.raise(py, &error)),
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
                return Err(self.raise(py, &error));
            }
        }
    }

    fn raise(&self, py: Python<'_>, error: &Error) -> PyErr {
        raise(py, &self.shared.names, error)
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
        let complete = self.is_over();
        if !complete {
            self.start();
        }
        complete
    }

    fn exception(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        // Not under the lock: making an exception runs the interpreter, which may run any code.
        match self.shared.result() {
            Some(Err(error)) => Some(self.raise(py, &error).into_value(py).into_any()),
            _ => None,
        }
    }

    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        self.at_end(py, Callback::Function(callback))
    }

    /// Completes a torch future with `result`, or with the call's error, when the call is complete.
    fn complete_future(&self, py: Python<'_>, future: Py<PyAny>, result: Py<PyAny>) -> PyResult<()> {
        self.at_end(py, Callback::Future { future, result })
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
