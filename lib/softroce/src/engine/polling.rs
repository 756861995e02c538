//! Programs that poll do the work of the engine's thread: no switch between threads lies between a packet and its
//! completion.
//!
//! While a program polls an empty queue again and again, the thread does not wait for the sockets, or it would be woken
//! by each packet only to find it taken. It waits again as soon as the program has found what it polled for, or has not
//! polled for a while.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, TryLockError};

use rustix::event::epoll;

use super::{Shared, now, run};
use crate::queue::cq::Drive;
use crate::sync::lock;

/// Empty polls in a row from which on the thread leaves the sockets alone.
const STREAK: u32 = 64;
/// Nanoseconds without a poll after which the thread takes over.
const LEFT_ALONE: u64 = 100_000;

#[derive(Default)]
pub(super) struct Polling {
    streak: AtomicU32,
    /// The thread does not wait for the sockets. Changed under the lock, so that it is what the wait was last told.
    away: AtomicBool,
    change: Mutex<()>,
    last: AtomicU64,
    /// The socket that packets came by last.
    pub(super) hot: AtomicUsize,
}

impl Drive for Shared {
    fn drive(&self) {
        let polling = &self.polling;
        let streak = polling.streak.fetch_add(1, Ordering::Relaxed);
        if streak >= STREAK {
            polling.last.store(now(), Ordering::Relaxed);
        }
        let mut receiving = match self.receiving.try_lock() {
            Ok(receiving) => receiving,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        // Packets may wait in any socket while the thread is away.
        let all = streak.is_multiple_of(16);
        let hot = polling.hot.load(Ordering::Relaxed);
        for (socket, _) in self.listeners.iter().enumerate() {
            if socket == hot || all {
                self.receive_locked(&mut receiving, Some(socket));
            }
        }
        if all {
            self.receive_locked(&mut receiving, None);
        }
    }

    fn rest(&self) {
        if self.polling.streak.load(Ordering::Relaxed) > 0 {
            self.polling.streak.store(0, Ordering::Relaxed);
            self.come_back();
        }
    }
}

impl Shared {
    /// For the thread, before it waits: leaves the sockets alone while a program polls, and says for how long.
    pub(super) fn leave_to_programs(&self, woken: bool) -> Option<u64> {
        let polled = now().saturating_sub(self.polling.last.load(Ordering::Relaxed)) < LEFT_ALONE;
        if !polled {
            self.come_back();
            return None;
        }
        // Only one that was woken for nothing goes away: it, and nobody else, then sees to it that it comes back.
        if woken {
            self.change_wait(true);
        }
        self.polling.away.load(Ordering::Acquire).then_some(LEFT_ALONE)
    }

    fn come_back(&self) {
        if self.polling.away.load(Ordering::Acquire) {
            self.change_wait(false);
        }
    }

    /// Lets the thread wait for the sockets, or for everything but them.
    fn change_wait(&self, away: bool) {
        let _guard = lock(&self.polling.change);
        if self.polling.away.swap(away, Ordering::AcqRel) == away {
            return;
        }
        let flags = if away { epoll::EventFlags::empty() } else { epoll::EventFlags::IN };
        let set = |fd: &dyn std::os::fd::AsFd, number| {
            // It fails for no descriptor that was added.
            let _ = epoll::modify(&self.epoll, fd.as_fd(), epoll::EventData::new_u64(number), flags);
        };
        for (i, listener) in self.listeners.iter().enumerate() {
            set(listener, run::SOCKETS + i as u64);
        }
        set(&self.slot.socket, run::UNIX);
    }
}
