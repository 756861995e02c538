//! Waiting while connecting: finite, in slices, with a look at the abort flag between them.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Longest time between two looks at the abort flag.
pub(crate) const SLICE: Duration = Duration::from_millis(20);

/// A deadline, who waits for whom, and what may interrupt.
pub(crate) struct Wait<'a> {
    start: Instant,
    limit: Duration,
    abort: &'a dyn Fn() -> Option<Error>,
    /// Our rank.
    pub(crate) rank: usize,
    /// Whom we wait for.
    pub(crate) peer: usize,
}

impl<'a> Wait<'a> {
    pub(crate) fn new(rank: usize, peer: usize, limit: Duration, abort: &'a dyn Fn() -> Option<Error>) -> Wait<'a> {
        Wait { start: Instant::now(), limit, abort, rank, peer }
    }

    /// The next slice to wait for, or the error that ends the wait. `detail` says what was being waited for.
    pub(crate) fn slice(&self, detail: impl FnOnce() -> String) -> Result<Duration> {
        if let Some(e) = (self.abort)() {
            return Err(e);
        }
        let waited = self.start.elapsed();
        match self.limit.checked_sub(waited) {
            Some(left) if !left.is_zero() => Ok(left.min(SLICE)),
            _ => Err(Error::Timeout {
                op: "connect".to_owned(),
                rank: self.rank,
                waited,
                missing: vec![self.peer],
                detail: detail(),
            }),
        }
    }

    /// Time left.
    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }
}
