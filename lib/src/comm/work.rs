//! The handle of an asynchronous call.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::state::lock;
use crate::error::Result;

/// A collective in flight that owns its buffers `B` until it is complete.
///
/// Dropping it without waiting is fine: the call goes on, its buffers are freed at the end.
#[derive(Debug)]
#[must_use = "the result of the call is in the Work: wait for it"]
pub struct Work<B> {
    shared: Arc<Shared<B>>,
}

#[derive(Debug)]
struct Shared<B> {
    outcome: Mutex<Option<Result<B>>>,
    done: Condvar,
}

impl<B> Work<B> {
    /// A handle, and the function that completes it.
    pub(super) fn pair() -> (Work<B>, impl FnOnce(Result<B>)) {
        let shared = Arc::new(Shared { outcome: Mutex::new(None), done: Condvar::new() });
        let completer = shared.clone();
        let complete = move |outcome| {
            *lock(&completer.outcome) = Some(outcome);
            completer.done.notify_all();
        };
        (Work { shared }, complete)
    }

    /// True when [`Work::wait`] would return at once.
    pub fn test(&self) -> bool {
        lock(&self.shared.outcome).is_some()
    }

    /// Waits for the end and gives the buffers back. Finite: the call itself fails at the communicator's deadline.
    pub fn wait(self) -> Result<B> {
        let mut outcome = lock(&self.shared.outcome);
        loop {
            match outcome.take() {
                Some(result) => return result,
                None => outcome = self.shared.done.wait(outcome).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits at most `timeout`; `Err(self)` when the call is still running.
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Result<B>, Work<B>> {
        let end = Instant::now() + timeout;
        let mut outcome = lock(&self.shared.outcome);
        loop {
            if let Some(result) = outcome.take() {
                return Ok(result);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            outcome = self.shared.done.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(outcome);
        Err(self)
    }
}
