//! Programs that poll do the work of the engine's thread: no switch between threads lies between a packet and its
//! completion.
//!
//! While a program polls an empty queue again and again, the thread does not wait for the sockets, or it would be woken
//! by each packet only to find it taken. It waits again as soon as the program has found what it polled for, or has not
//! polled for a while.
//!
//! Long messages are another matter: there the work is in the bytes. While many come in, the thread takes them and does
//! not sleep between them, the program's thread sends, also what an acknowledgement makes room for, and the two work at
//! the same time. This needs processors to spare.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::event::epoll;

use super::{Shared, now, run};
use crate::queue::cq::Drive;
use crate::sync::lock;

/// Empty polls in a row from which on the thread leaves the sockets alone.
const STREAK: u32 = 64;
/// Nanoseconds without a poll after which the thread takes over.
const LEFT_ALONE: u64 = 100_000;

/// Bytes of one turn that are many, and nanoseconds for which more of them are expected.
const MANY: usize = 16 << 10;
pub(super) const EXPECTED: u64 = 100_000;
/// Processors from which on the thread works beside the program: for both, and for a peer's two on the same host.
const TO_SPARE: usize = 4;

pub(super) struct Polling {
    streak: AtomicU32,
    /// The thread does not wait for the sockets. Changed under the lock, so that it is what the wait was last told.
    away: AtomicBool,
    change: Mutex<()>,
    last: AtomicU64,
    /// The socket that packets came by last.
    pub(super) hot: AtomicUsize,
    /// There are processors to spare.
    to_spare: bool,
    /// Until when many bytes are expected; 0 for not at all.
    many: AtomicU64,
    /// When a program polled last while they were.
    polled: AtomicU64,
}

impl Default for Polling {
    fn default() -> Polling {
        Polling {
            streak: AtomicU32::new(0),
            away: AtomicBool::new(false),
            change: Mutex::default(),
            last: AtomicU64::new(0),
            hot: AtomicUsize::new(0),
            to_spare: std::thread::available_parallelism().is_ok_and(|n| n.get() >= TO_SPARE),
            many: AtomicU64::new(0),
            polled: AtomicU64::new(0),
        }
    }
}

impl Polling {
    /// There are processors for a second thread.
    pub(super) fn to_spare(&self) -> bool {
        self.to_spare
    }

    /// So many bytes came in one turn. `true` where more are expected, for [`EXPECTED`].
    pub(super) fn came(&self, bytes: usize) -> bool {
        let many = bytes >= MANY && self.to_spare;
        if many {
            self.many.store(now() + EXPECTED, Ordering::Relaxed);
        }
        many
    }

    /// Many bytes are coming in: they are left to the thread.
    pub(super) fn many_come(&self) -> bool {
        let until = self.many.load(Ordering::Relaxed);
        if until == 0 {
            return false;
        }
        let come = now() < until;
        if !come {
            self.many.store(0, Ordering::Relaxed);
        }
        come
    }
}

impl Drive for Shared {
    fn drive(&self) {
        let polling = &self.polling;
        let streak = polling.streak.fetch_add(1, Ordering::Relaxed);
        if streak >= STREAK {
            polling.last.store(now(), Ordering::Relaxed);
        }
        if polling.many_come() {
            polling.polled.store(now(), Ordering::Relaxed);
            self.come_back();
            run::continue_listed(self);
            return;
        }
        // Packets may wait in any socket while the thread is away.
        let all = streak.is_multiple_of(16);
        let hot = polling.hot.load(Ordering::Relaxed);
        let sockets = self.listeners.iter().enumerate().map(|(socket, _)| Some(socket));
        for socket in sockets.filter(|socket| all || *socket == Some(hot)).chain(all.then_some(None)) {
            if let Some(mut receiving) = self.try_receiving(socket) {
                receiving.waits = self.programs_wait();
                self.receive_locked(&mut receiving, socket);
            }
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
    /// Programs' threads wait for the engine's where it sends for the same queue pair. With few processors it may be
    /// one of them that keeps it from running: a program that polls takes no pause.
    pub(super) fn programs_wait(&self) -> bool {
        !self.polling.to_spare
    }

    /// Many bytes come in, and a program polls meanwhile: it sends requests, while the thread that receives them
    /// answers.
    pub(super) fn program_sends(&self) -> bool {
        self.polling.many_come() && now().saturating_sub(self.polling.polled.load(Ordering::Relaxed)) < LEFT_ALONE
    }

    /// For the thread, before it waits: leaves the sockets alone while a program polls, and says for how long.
    pub(super) fn leave_to_programs(&self, woken: bool) -> Option<u64> {
        if self.polling.many_come() {
            self.come_back();
            return Some(0);
        }
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
