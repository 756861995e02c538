//! Waiting while connecting: finite, in slices, with a look at the abort flag between them.

use std::time::{Duration, Instant};

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags};

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::poll;

/// Longest time between two looks at the abort flag.
pub(crate) const SLICE: Duration = Duration::from_millis(20);

/// A deadline, who waits for whom, and what may interrupt.
pub struct Wait<'a> {
    start: Instant,
    limit: Duration,
    abort: &'a dyn Fn() -> Option<Error>,
    /// Our rank, and the rank that we wait for; `None` between processes without ranks.
    ranks: Option<(usize, usize)>,
}

impl<'a> Wait<'a> {
    /// Begins a wait of `rank` for `peer` that ends after `limit`, or with the error that `abort` returns.
    pub fn new(rank: usize, peer: usize, limit: Duration, abort: &'a dyn Fn() -> Option<Error>) -> Wait<'a> {
        Wait { ranks: Some((rank, peer)), ..Wait::without_ranks(limit, abort) }
    }

    pub(crate) fn without_ranks(limit: Duration, abort: &'a dyn Fn() -> Option<Error>) -> Wait<'a> {
        Wait { start: Instant::now(), limit, abort, ranks: None }
    }

    /// The next slice to wait for, or the error that ends the wait. `detail` says what was being waited for.
    pub(crate) fn slice(&self, detail: impl FnOnce() -> String) -> Result<Duration> {
        if let Some(e) = (self.abort)() {
            return Err(e);
        }
        let waited = self.start.elapsed();
        if let Some(left) = self.limit.checked_sub(waited).filter(|left| !left.is_zero()) {
            return Ok(left.min(SLICE));
        }
        let (op, detail) = ("connect".to_owned(), detail());
        Err(match self.ranks {
            Some((rank, peer)) => Error::Timeout { op, rank, waited, missing: vec![peer], detail },
            None => Error::Connection { op, connection: format!("not established within {waited:?}"), detail },
        })
    }

    /// Time left.
    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    /// Waits until the descriptor is ready (or hung up): `false` after `limit`, an error when the whole wait is over.
    pub(crate) fn ready(
        &self,
        fd: &impl AsFd,
        flags: PollFlags,
        limit: Duration,
        detail: impl Fn() -> String,
    ) -> Result<bool> {
        let start = Instant::now();
        loop {
            let slice = self.slice(&detail)?;
            match poll(&mut [PollFd::new(fd, flags)], slice) {
                Ok(0) if start.elapsed() >= limit => return Ok(false),
                Ok(0) => {}
                Ok(_) => return Ok(true),
                Err(e) => return Err(Error::errno("connect", "waiting for a socket", e)),
            }
        }
    }

    /// Lets `time` pass, unless the wait is over before.
    pub fn pause(&self, time: Duration, detail: impl Fn() -> String) -> Result<()> {
        let start = Instant::now();
        while let Some(left) = time.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::sleep(self.slice(&detail)?.min(left));
        }
        Ok(())
    }
}
