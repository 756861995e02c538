//! The one timer of an engine.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::cell::NEVER;
use crate::error::{Error, Result};
use crate::fork::Own;
use crate::sync::lock;

/// A timer that any thread may set to an earlier time. It is not set to a later one: with each acknowledgement a
/// deadline moves, and one firing too early in a while costs less than a system call for each.
pub(super) struct Timer {
    pub(super) fd: Own<OwnedFd>,
    set: Mutex<()>,
    at: AtomicU64,
}

impl Timer {
    pub(super) fn new() -> Result<Timer> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(|e| Error::system("making a timer", &e.into()))?;
        Ok(Timer { fd: Own::new(fd), set: Mutex::new(()), at: AtomicU64::new(NEVER) })
    }

    /// Makes the timer fire at `at` or earlier, in nanoseconds of the monotonic clock.
    pub(super) fn at_latest(&self, at: u64) {
        // The thread that handles the timer looks at all deadlines after it has reset `at`; this one was stored before
        // `at` is looked at here. One of the two sees the other, given the fences.
        fence(Ordering::SeqCst);
        if at >= self.at.load(Ordering::Acquire) {
            return;
        }
        let _guard = lock(&self.set);
        if at < self.at.load(Ordering::Acquire) {
            self.at.store(at, Ordering::Release);
            let value = Timespec { tv_sec: (at / 1_000_000_000) as i64, tv_nsec: (at % 1_000_000_000).max(1) as _ };
            let spec = Itimerspec { it_interval: Timespec::default(), it_value: value };
            // It fails for no valid time.
            let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &spec);
        }
    }

    /// Resets the timer after it has fired.
    pub(super) fn fired(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.fd, &mut count);
        let _guard = lock(&self.set);
        self.at.store(NEVER, Ordering::Release);
        fence(Ordering::SeqCst);
    }
}
