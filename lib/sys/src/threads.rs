//! Threads of the library, and how they lock, wait and end.

use std::sync::{Mutex, MutexGuard, Once, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

use crate::fork::Origin;
use tinynccl_plan::error::{Error, Result};

/// Locks, also after another thread panicked with the lock held: our critical sections leave consistent values.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], if no thread holds it; else `None`.
#[inline]
pub fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// `poll(2)`: how many of `fds` are ready. A signal counts as the end of the time.
pub fn poll(fds: &mut [PollFd<'_>], time: Duration) -> Result<usize, Errno> {
    let time = Timespec { tv_sec: time.as_secs().min(3600) as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    match rustix::event::poll(fds, Some(&time)) {
        Err(Errno::INTR) => Ok(0),
        other => other,
    }
}

/// Time left until `deadline`.
pub fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// `now + limit`, also for limits beyond what a clock can hold.
pub fn deadline_after(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600))
}

/// Descriptors for which the process's table is grown at once.
const DESCRIPTORS: u64 = 1024;

/// Grows the table of descriptors, once in a process and in a separate thread. Linux lets the table grow at the 64th
/// descriptor, the 256th and so on, and where threads share it, the one that opened that descriptor waits until every
/// core has passed through the scheduler (`synchronize_rcu`): 20 to 35 ms on a machine with 32 cores, which a
/// communicator took longer to start.
pub fn make_room_for_descriptors() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let grow = || {
            if let Err(e) = grow_descriptors() {
                log::debug!("making room for {DESCRIPTORS} descriptors: {e}");
            }
        };
        let started = std::thread::Builder::new().name("tinynccl-room".to_owned()).spawn(grow);
        drop(started.inspect_err(|e| log::debug!("making room for descriptors: {e}")));
    });
}

/// The table does not shrink again when the descriptor is closed.
fn grow_descriptors() -> rustix::io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let last = limit.unwrap_or(DESCRIPTORS).min(DESCRIPTORS).saturating_sub(1);
    let any = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    rustix::io::fcntl_dupfd_cloexec(&any, last as i32).map(drop)
}

/// A thread that is joined at the latest when this is dropped: its owner has asked it to end before. A forked child has
/// none of its parent's threads, and joins nothing.
#[derive(Debug)]
pub struct Thread {
    what: String,
    handle: Mutex<Option<JoinHandle<()>>>,
    origin: Origin,
}

impl Thread {
    /// Starts `run` for an operation `op`, in a thread that the system calls `name` and messages call `what`.
    ///
    /// # Errors
    /// [`Error::Os`] when there are no threads left.
    pub fn start(op: &str, name: String, what: String, run: impl FnOnce() + Send + 'static) -> Result<Thread> {
        let handle = std::thread::Builder::new().name(name).spawn(run);
        let handle = handle.map_err(|e| Error::io(op, format!("starting {what}"), &e))?;
        Ok(Thread { what, handle: Mutex::new(Some(handle)), origin: Origin::here() })
    }

    /// Returns true in the process that the thread runs in, false in a forked child.
    pub fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// Returns true if joining the thread takes no time.
    pub fn is_finished(&self) -> bool {
        lock(&self.handle).as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Detaches the thread: no one joins it, it ends by itself.
    pub fn leave(&self) {
        drop(lock(&self.handle).take());
    }

    /// Waits for its end, once; not in the thread itself, nor in a child.
    pub fn join(&self) {
        if !self.origin.is_here() {
            return;
        }
        let handle = lock(&self.handle).take().filter(|handle| handle.thread().id() != std::thread::current().id());
        if handle.is_some_and(|handle| handle.join().is_err()) {
            log::error!("{} panicked", self.what);
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if self.origin.is_here() {
            return self.join();
        }
        // Without the lock, which a thread of the parent may have held when it forked.
        std::mem::forget(self.handle.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_descriptors_has_room_and_no_more_is_open() {
        let size = || -> u64 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap().trim().parse().unwrap()
        };
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let wanted = limit.unwrap_or(DESCRIPTORS).min(DESCRIPTORS);
        grow_descriptors().unwrap();
        assert!(size() >= wanted, "{} of {wanted}", size());
        assert!(!std::path::Path::new(&format!("/proc/self/fd/{}", wanted - 1)).exists());
    }
}
