//! State that a forked child inherits and must not use: its parent's membership among the ranks.
//!
//! A child has copies of the parent's descriptors and memory, and none of its threads. While it holds a connection, the
//! parent's death does not close it; and what it drops, a peer would take for the parent's goodbye. So
//!
//! - each [`Kept`] descriptor is closed in the child as soon as there is one: peers see the parent's death as they see
//!   any other, over any network and across hosts, which no pidfd would show them;
//! - an object that has threads, or sends a goodbye when it is dropped, records its [`Origin`] and does nothing
//!   elsewhere. To ask costs a load.
//!
//! Both hang on `pthread_atfork(3)`, which every libc and kernel has (a page with `MADV_WIPEONFORK` would serve for the
//! second, and close nothing). Children that are made without `fork(3)` are not noticed: those of a bare `clone(2)`, of
//! `_Fork`. `posix_spawn` and `vfork` go on to `exec`, which closes our descriptors by itself.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use tinynccl_plan::error::{Error, Result};

/// Forks between this process and the one in which the library was first used.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Returns the number of forks between this process and the one in which the library was first used. An object made at
/// another number belongs to a parent.
pub fn forks() -> u32 {
    prepare();
    FORKS.load(Ordering::Relaxed)
}

/// The process in which something was made.
#[derive(Debug, Clone, Copy)]
pub struct Origin {
    /// Different in every process from those of its ancestors: nothing else is inherited.
    forks: u32,
    pid: u32,
}

impl Origin {
    /// This process.
    pub fn here() -> Origin {
        Origin { forks: forks(), pid: std::process::id() }
    }

    /// Returns true in the process that this names, false in a child of it.
    #[inline]
    pub fn is_here(self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Fails with an error of `op` in a child.
    #[inline]
    pub fn check(self, op: impl FnOnce() -> String, rank: usize) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(self.elsewhere(op(), rank)) }
    }

    #[cold]
    fn elsewhere(self, op: String, rank: usize) -> Error {
        let (made, here) = (self.pid, std::process::id());
        Error::invalid(
            op,
            format!(
                "rank {rank} is process {made}, and process {here} was forked from it: a child has no part in its parent's \
                 communicators; make the call in process {made}"
            ),
        )
    }
}

/// A descriptor by which peers notice the end of this process: a forked child has something else at its number.
#[derive(Debug)]
pub struct Kept<T> {
    // Dropped first: a number that is free again may be anybody's.
    _place: Place,
    inner: T,
}

impl<T: AsFd> Kept<T> {
    /// Keeps it from children that are forked from now on.
    pub fn new(inner: T) -> Kept<T> {
        prepare();
        Kept { _place: Place::take(inner.as_fd().as_raw_fd()), inner }
    }

    /// From here on children have it, too.
    pub fn into_inner(self) -> T {
        self.inner
    }
}

impl<T> Deref for Kept<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for Kept<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: AsFd> AsFd for Kept<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

const FREE: i32 = -1;

/// Descriptors to close, in memory that stays where it is: the child reads it while locks may be held forever.
struct Table {
    places: [AtomicI32; 256],
    next: OnceLock<Box<Table>>,
}

impl Table {
    const fn new() -> Table {
        Table { places: [const { AtomicI32::new(FREE) }; 256], next: OnceLock::new() }
    }
}

static TABLE: Table = Table::new();

/// A descriptor's entry in the table.
#[derive(Debug)]
struct Place {
    place: &'static AtomicI32,
    origin: Origin,
}

impl Place {
    fn take(fd: i32) -> Place {
        let mut table = &TABLE;
        loop {
            for place in &table.places {
                if place.compare_exchange(FREE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    return Place { place, origin: Origin::here() };
                }
            }
            table = table.next.get_or_init(|| Box::new(Table::new()));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // In a child it may be another descriptor's by now.
        if self.origin.is_here() {
            self.place.store(FREE, Ordering::Release);
        }
    }
}

fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler makes system calls and uses atomics, as a child of a process with threads may.
        let status = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if status != 0 {
            let error = std::io::Error::from_raw_os_error(status);
            log::warn!("forked children cannot be told from their parent: pthread_atfork: {error}");
        }
    });
}

/// Runs in each child before `fork` returns there.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // Something harmless takes the number, which values that the child inherited may still close or use.
    let mut harmless = -1;
    let mut rest = Some(&TABLE);
    while let Some(table) = rest {
        for place in &table.places {
            let fd = place.swap(FREE, Ordering::Relaxed);
            if fd == FREE {
                continue;
            }
            // SAFETY: system calls on numbers only; `fd` is a descriptor of the parent's that nothing in the child
            // relies on.
            unsafe {
                if harmless < 0 {
                    harmless = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
                }
                if harmless < 0 || libc::dup3(harmless, fd, libc::O_CLOEXEC) < 0 {
                    libc::close(fd);
                }
            }
        }
        rest = table.next.get().map(|next| &**next);
    }
    if harmless >= 0 {
        // SAFETY: ours, and used for the last time.
        unsafe { libc::close(harmless) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// Forks; the child exits with success if `f` returns true.
    fn child(f: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child uses atomics and system calls, and ends without running anything else.
        match unsafe { libc::fork() } {
            // SAFETY: ends the process.
            0 => unsafe { libc::_exit(i32::from(!f())) },
            pid => {
                let mut status = -1;
                // SAFETY: waits for our own child.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                status == 0
            }
        }
    }

    #[test]
    fn a_child_knows_that_it_is_one_and_so_does_its_own() {
        let parent = Origin::here();
        assert!(parent.is_here());
        let grandchild = |origin: Origin| child(|| !origin.is_here() && !parent.is_here());
        assert!(child(|| !parent.is_here() && Origin::here().is_here() && grandchild(Origin::here())));
        assert!(parent.is_here());
    }

    #[test]
    fn a_child_does_not_keep_a_connection_open() {
        // More than one table holds.
        let pairs: Vec<_> = (0..300).map(|_| UnixStream::pair().unwrap()).collect();
        let (kept, peers): (Vec<_>, Vec<_>) = pairs.into_iter().map(|(a, b)| (Kept::new(a), b)).unzip();
        let plain = UnixStream::pair().unwrap();
        let (mut out, mut stay) = UnixStream::pair().unwrap();
        // SAFETY: the child waits in a system call, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop(out);
            let _ = stay.read(&mut [0]);
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        drop(stay);
        let (mut theirs, ours) = (plain.1, plain.0);
        drop((kept, ours));
        for mut peer in peers {
            assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the child holds the other end");
        }
        // The child still lives, and has what is not kept from it.
        theirs.set_nonblocking(true).unwrap();
        assert_eq!(theirs.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        out.set_nonblocking(true).unwrap();
        assert_eq!(out.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        drop(out);
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    }
}
