//! Joining a job: settings, and a wait for the other ranks that a signal can end.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tinynccl::config::Environment;
use tinynccl::{Config, Error, Result};

use crate::errors::{invalid, raise};

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
    let mut config = environment.check().and(read).map_err(|e| raise(py, &e))?;
    if let Some(seconds) = timeout {
        config.timeout = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero()).ok_or_else(|| {
            invalid(py, "timeout", format!("{seconds} seconds, expected a positive, finite number of seconds"))
        })?;
        config.connect_timeout = config.connect_timeout.min(config.timeout);
    }
    if let Some(transport) = transport {
        config.transport = transport.parse().map_err(|e: String| invalid(py, "transport", e))?;
    }
    Ok(config)
}

/// Waits for a thread of its own, so that a signal ends the wait; the thread ends at its own deadline.
pub(crate) fn joining(
    py: Python<'_>,
    join: impl FnOnce() -> Result<tinynccl::Comm> + Send + 'static,
) -> PyResult<tinynccl::Comm> {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver);
    std::thread::Builder::new()
        .name("tinynccl-join".to_owned())
        .spawn(move || sender.send(join()))
        .map_err(|e| raise(py, &Error::io("Comm", "starting a thread", &e)))?;
    loop {
        match py
            .detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(Duration::from_millis(50)))
        {
            Ok(outcome) => return outcome.map_err(|e| raise(py, &e)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(invalid(py, "Comm", "the thread that joined the ranks ended early".to_owned()));
            }
        }
    }
}
