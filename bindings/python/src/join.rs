//! Joining a job: settings, and a wait for the other ranks that a signal can end.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tinynccl::config::Environment;
use tinynccl::{Config, Error, Result};

use crate::errors::{Names, invalid, raise, raise_plainly};

/// Longest deadline: a century, which can be added to every instant.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Settings of the environment, overridden by the caller's arguments.
pub(crate) fn config(
    py: Python<'_>,
    timeout: Option<f64>,
    transport: Option<&str>,
    cuda_blocks: Option<usize>,
) -> PyResult<Config> {
    let environment = Environment::default();
    let lookup = |name: &str| match (name, cuda_blocks) {
        ("TINYNCCL_CUDA_BLOCKS", Some(blocks)) => Some(blocks.to_string()),
        _ => environment.get(name),
    };
    let read = Config::from_lookup(lookup);
    let mut config = environment.check().and(read).map_err(|e| raise_plainly(py, &e))?;
    if let Some(seconds) = timeout {
        config.timeout = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero()).ok_or_else(|| {
            invalid(py, "timeout", format!("{seconds} seconds, expected a positive, finite number of seconds"))
        })?;
        config.timeout = config.timeout.min(LONGEST);
        config.connect_timeout = config.connect_timeout.min(config.timeout);
    }
    if let Some(transport) = transport {
        config.transport = transport.parse().map_err(|e: String| invalid(py, "transport", e))?;
    }
    Ok(config)
}

thread_local! {
    /// Flag that is set when no thread waits any more for what this thread joins.
    static ABANDONED: OnceCell<Arc<AtomicBool>> = const { OnceCell::new() };
}

fn is_abandoned() -> bool {
    ABANDONED.with(|flag| flag.get().is_some_and(|flag| flag.load(Ordering::Acquire)))
}

/// Joins in a separate thread, so that a signal, or an exception of `watch`, ends the wait at once. `watch` is called
/// repeatedly.
pub(crate) fn joining(
    py: Python<'_>,
    names: &Names,
    watch: Option<&Bound<'_, PyAny>>,
    join: impl FnOnce() -> Result<tinynccl::Comm> + Send + 'static,
) -> PyResult<tinynccl::Comm> {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver);
    let abandoned = Arc::new(AtomicBool::new(false));
    let flag = abandoned.clone();
    let run = move || {
        ABANDONED.with(|own| own.set(flag).is_ok());
        sender.send(tinynccl::interrupt::watched(is_abandoned, join))
    };
    std::thread::Builder::new()
        .name("tinynccl-join".to_owned())
        .spawn(run)
        .map_err(|e| raise_plainly(py, &Error::io("Comm", "starting a thread", &e)))?;
    loop {
        match py
            .detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(Duration::from_millis(50)))
        {
            Ok(outcome) => return outcome.map_err(|e| raise(py, names, &e)),
            Err(RecvTimeoutError::Timeout) => {
                let ended = py.check_signals().and_then(|()| watch.map_or(Ok(()), |watch| watch.call0().map(drop)));
                ended.inspect_err(|_| abandoned.store(true, Ordering::Release))?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(invalid(py, "Comm", "the thread that joined the ranks ended early".to_owned()));
            }
        }
    }
}
