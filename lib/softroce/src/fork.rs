//! Sockets and queue pairs that a forked child inherits from its parent and must not use.
//!
//! A child has copies of the parent's descriptors and memory, and none of its threads. A socket that it holds on to
//! takes packets that no one reads, and a queue pair that it posts to would use its parent's sequence numbers. So
//!
//! - each [`Own`] descriptor is replaced in the child by one that is never readable, before `fork` returns there;
//! - what a program calls notes its [`Origin`] and fails elsewhere, before it takes a lock that no thread may release.
//!   The check costs a load.
//!
//! Both hang on `pthread_atfork(3)`. A child of a bare `clone(2)` or of `_Fork` is known by a page that the kernel wipes
//! in every child (`MADV_WIPEONFORK`); it keeps the sockets. `posix_spawn` and `vfork` go on to `exec`, which closes them.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

use crate::error::{Error, Result};

/// The name of the process: 0 in a child in which nothing was made yet.
static FALLBACK: AtomicU64 = AtomicU64::new(0);
static NAME: AtomicPtr<AtomicU64> = AtomicPtr::new((&raw const FALLBACK).cast_mut());

fn name() -> &'static AtomicU64 {
    // SAFETY: the fallback or a page that is never unmapped, of zeros or of a number that was stored.
    unsafe { &*NAME.load(Ordering::Acquire) }
}

/// The process in which something was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin(u64);

impl Origin {
    /// This process.
    pub(crate) fn here() -> Origin {
        prepare();
        // The count is inherited: the names of a process and of its ancestors differ, also where a number is used again.
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let new = COUNT.load(Ordering::Relaxed) << 32 | u64::from(std::process::id());
        match name().compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                COUNT.fetch_add(1, Ordering::Relaxed);
                Origin(new)
            }
            Err(named) => Origin(named),
        }
    }

    /// Returns true in the process itself, false in a child of it.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        self.0 == name().load(Ordering::Relaxed)
    }

    /// Fails with `EINVAL` in a child.
    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(self.elsewhere()) }
    }

    #[cold]
    fn elsewhere(self) -> Error {
        let (made, here) = (self.0 as u32, std::process::id());
        Error::invalid(format!(
            "process {here} was forked from {made}, which opened the card: a child has no part in its parent's objects; it \
             opens the card itself"
        ))
    }
}

/// A descriptor of the RDMA device's: a forked child has something harmless at its number.
#[derive(Debug)]
pub(crate) struct Own<T> {
    // Dropped first: a number that is free again may be of any descriptor.
    _place: Place,
    inner: T,
}

impl<T: AsFd> Own<T> {
    pub(crate) fn new(inner: T) -> Own<T> {
        Own { _place: Place::take(inner.as_fd().as_raw_fd()), inner }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsFd> AsFd for Own<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

const FREE: i32 = -1;

/// Descriptors to replace, in memory that stays where it is: the child reads it while locks may be held forever.
struct Table {
    places: [AtomicI32; 64],
    next: OnceLock<Box<Table>>,
}

impl Table {
    const fn new() -> Table {
        Table { places: [const { AtomicI32::new(FREE) }; 64], next: OnceLock::new() }
    }
}

static TABLE: Table = Table::new();

/// A descriptor's place in the table.
#[derive(Debug)]
struct Place {
    place: &'static AtomicI32,
    origin: Origin,
}

impl Place {
    fn take(fd: i32) -> Place {
        let origin = Origin::here();
        let mut table = &TABLE;
        loop {
            for place in &table.places {
                if place.compare_exchange(FREE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    return Place { place, origin };
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
        // SAFETY: a new page, which is never unmapped. The handler makes system calls and uses atomics, as a child of a
        // process with threads may.
        unsafe {
            let (writes, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let page = libc::mmap(std::ptr::null_mut(), 4096, writes, private, -1, 0);
            if page != libc::MAP_FAILED && libc::madvise(page, 4096, libc::MADV_WIPEONFORK) == 0 {
                NAME.store(page.cast(), Ordering::Release);
            }
            let status = libc::pthread_atfork(None, None, Some(in_child));
            if status != 0 {
                let error = std::io::Error::from_raw_os_error(status);
                log::warn!("forked children keep the card's sockets: pthread_atfork: {error}");
            }
        }
    });
}

/// Runs in each child before `fork` returns there.
extern "C" fn in_child() {
    name().store(0, Ordering::Relaxed);
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

    /// Makes a child by `fork`; the child ends with the result of `f`.
    fn child(fork: impl FnOnce() -> libc::pid_t, f: impl FnOnce() -> bool) -> bool {
        match fork() {
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

    fn fork() -> libc::pid_t {
        // SAFETY: the child uses atomics and system calls, and ends without running anything else.
        unsafe { libc::fork() }
    }

    fn bare() -> libc::pid_t {
        // SAFETY: as above; no handler runs, and no memory is shared.
        unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t }
    }

    #[test]
    fn a_child_knows_that_it_is_one_however_it_was_made() {
        let parent = Origin::here();
        assert!(parent.check().is_ok());
        for make in [fork as fn() -> libc::pid_t, bare] {
            let grandchild = |origin: Origin| child(make, || !origin.is_here() && !parent.is_here());
            assert!(child(make, || !parent.is_here() && Origin::here().is_here() && grandchild(Origin::here())));
        }
        assert!(parent.is_here() && Origin::here() == parent);
    }

    #[test]
    fn a_child_does_not_hold_a_descriptor() {
        // More than one table holds.
        let pairs: Vec<_> = (0..150).map(|_| UnixStream::pair().expect("a pair")).collect();
        let (own, peers): (Vec<_>, Vec<_>) = pairs.into_iter().map(|(a, b)| (Own::new(a), b)).unzip();
        let (out, mut stay) = UnixStream::pair().expect("a pair");
        let pid = fork();
        if pid == 0 {
            drop(out);
            let _ = stay.read(&mut [0]);
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        drop((stay, own));
        for mut peer in peers {
            assert_eq!(peer.read(&mut [0]).expect("read"), 0, "the child holds the other end");
        }
        drop(out);
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    }
}
