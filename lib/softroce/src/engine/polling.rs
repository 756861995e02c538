//! Programs that poll drive progress inline, in place of the engine's thread: no switch between threads lies between a
//! packet and its completion.
//!
//! With few processors (core contention) the thread leaves the sockets alone while a program polls, or each packet
//! would wake it only to find that the program has taken it, and to take the program's processor away. It looks now and
//! then whether the program still polls. If it finds packets that no thread took, the program does not drive progress:
//! some poll once and then wait for bytes in memory, some compute. The thread then stays, longer each time. A program
//! that has polled in vain for a while offers its processor: the peer that it waits for may need it.
//!
//! With processors to spare the thread stays, as packets that wait for its next look would cost more than it does. Long
//! messages need it there: the work is in the bytes. While many come in, the thread takes them and does not sleep
//! between them, the program's thread sends, also what an acknowledgement makes room for, and the two work at the same
//! time.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::event::epoll;

use super::{Shared, now, run};
use crate::queue::cq::Drive;

/// Nanoseconds after a poll for which a program counts as polling.
const RECENT: u64 = 20_000;
/// Nanoseconds after which the thread looks whether a program still polls: at first, and at most.
const LOOK: u64 = 100_000;
const LONGEST_LOOK: u64 = 800_000;
/// Batches of packets after which a program is relied on, though some were left lying: it did not run for a while.
const RELIABLE: u32 = 16;
/// Nanoseconds for which the thread stays after packets were left lying: at first, and at most.
const STAY: u64 = 10_000_000;
const LONGEST_STAY: u64 = 1_000_000_000;

/// Polls in vain after which a program's thread offers its processor to others before each poll.
const PATIENCE: u32 = 64;

/// Bytes of one time slice that are many, and nanoseconds for which more of them are expected.
const MANY: usize = 16 << 10;
pub(super) const EXPECTED: u64 = 100_000;
/// Processors from which on the thread works beside the program: for both, and for a peer's two on the same host.
const TO_SPARE: usize = 4;

/// Shared region of the threads that poll and the engine's thread.
pub(super) struct Polling {
    /// True while the engine's thread leaves the sockets alone.
    away: AtomicBool,
    /// Time of a program's last poll that found nothing, in nanoseconds of the monotonic clock.
    last: AtomicU64,
    /// Batches of packets that programs took since the thread went away.
    taken: AtomicU32,
    /// Completion queues that notify: their programs sleep, or are about to.
    armed: AtomicUsize,
    /// The socket that packets came by last.
    hot: AtomicUsize,
    /// Polls since packets came last.
    vain: AtomicU32,
    /// True if there are processors for a second thread.
    to_spare: bool,
    /// Time until which many bytes are expected, in nanoseconds of the monotonic clock; 0 for not at all.
    many: AtomicU64,
    /// Time of a program's last poll while many bytes were expected, in nanoseconds of the monotonic clock.
    polled: AtomicU64,
}

impl Default for Polling {
    fn default() -> Polling {
        Polling {
            away: AtomicBool::new(false),
            last: AtomicU64::new(0),
            taken: AtomicU32::new(0),
            armed: AtomicUsize::new(0),
            hot: AtomicUsize::new(0),
            vain: AtomicU32::new(0),
            to_spare: std::thread::available_parallelism().is_ok_and(|n| n.get() >= TO_SPARE),
            many: AtomicU64::new(0),
            polled: AtomicU64::new(0),
        }
    }
}

impl Polling {
    /// Returns true if there are processors for a second thread.
    pub(super) fn to_spare(&self) -> bool {
        self.to_spare
    }

    /// Packets came by a socket.
    pub(super) fn found(&self, socket: Option<usize>) {
        if let Some(socket) = socket {
            self.hot.store(socket, Ordering::Relaxed);
        }
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.vain.store(0, Ordering::Relaxed);
    }

    /// Records that `bytes` came in one time slice. Returns true if more are expected, for [`EXPECTED`].
    pub(super) fn came(&self, bytes: usize) -> bool {
        let many = bytes >= MANY && self.to_spare;
        if many {
            self.many.store(now() + EXPECTED, Ordering::Relaxed);
        }
        many
    }

    /// Returns true while many bytes come in, which are left to the engine's thread.
    fn many_come(&self, now: u64) -> bool {
        let until = self.many.load(Ordering::Relaxed);
        if until == 0 {
            return false;
        }
        if now >= until {
            self.many.store(0, Ordering::Relaxed);
        }
        now < until
    }
}

impl Drive for Shared {
    fn drive(&self) {
        let (polling, now) = (&self.polling, now());
        if polling.many_come(now) {
            polling.polled.store(now, Ordering::Relaxed);
            self.come_back();
            run::continue_listed(self);
            return;
        }
        polling.last.store(now, Ordering::Relaxed);
        let vain = polling.vain.fetch_add(1, Ordering::Relaxed);
        if vain >= PATIENCE && !polling.to_spare {
            std::thread::yield_now();
        }
        // The socket that is likely to have something, and every other time all of them.
        if vain.is_multiple_of(2) {
            return self.take(Some(polling.hot.load(Ordering::Relaxed)));
        }
        let mut events = [const { std::mem::MaybeUninit::uninit() }; run::EVENTS];
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events[..], Some(&run::AT_ONCE)) else { return };
        for event in events {
            match event.data.u64() {
                run::CONTROL => {}
                number => self.take(run::socket(number)),
            }
        }
    }

    fn armed(&self, armed: bool) {
        if armed {
            self.polling.armed.fetch_add(1, Ordering::SeqCst);
            self.come_back();
        } else {
            self.polling.armed.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Shared {
    /// Takes what waits in a socket, if no other thread is receiving there. For a program's thread.
    fn take(&self, socket: Option<usize>) {
        let Some(mut receiving) = self.try_receiving(socket) else { return };
        receiving.waits = self.programs_wait();
        self.receive_locked(&mut receiving, socket);
    }

    /// Programs' threads wait for the engine's where it sends for the same queue pair. With few processors it may be
    /// one of them that keeps it from running: a program that polls takes no pause.
    pub(super) fn programs_wait(&self) -> bool {
        !self.polling.to_spare
    }

    /// Returns true while many bytes come in and a program polls: the program sends requests, while the engine's thread
    /// receives and answers.
    pub(super) fn program_sends(&self) -> bool {
        let now = now();
        self.polling.many_come(now) && now.saturating_sub(self.polling.polled.load(Ordering::Relaxed)) < LOOK
    }

    /// Calls the thread back to the sockets.
    fn come_back(&self) {
        if self.polling.away.load(Ordering::SeqCst) && self.polling.away.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }
}

/// State by which the engine's thread decides to leave the sockets to programs. For that thread alone.
#[derive(Default)]
pub(super) struct Absence {
    away: bool,
    /// True if the thread has come back by itself and looks for packets that were left lying.
    looks: bool,
    /// Nanoseconds of absence until the next look.
    look: u64,
    /// Time until which the thread stays, and for how many nanoseconds that was.
    until: u64,
    stay: u64,
}

/// Kind of wait of the engine's thread.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Waits for everything.
    All,
    /// Does not wait, and takes what is there.
    Not,
    /// Waits for everything but packets, at most this many nanoseconds.
    Away(u64),
}

impl Absence {
    /// Decides how to wait next. `came`: packets ended the last wait.
    pub(super) fn next(&mut self, polling: &Polling, now: u64, came: bool) -> Wait {
        if polling.many_come(now) {
            polling.away.store(false, Ordering::SeqCst);
            (self.away, self.looks) = (false, false);
            return Wait::Not;
        }
        let polled = now.saturating_sub(polling.last.load(Ordering::Relaxed)) < RECENT;
        if self.away {
            if polled && polling.away.load(Ordering::SeqCst) {
                self.look = (2 * self.look).min(LONGEST_LOOK);
                return Wait::Away(self.look);
            }
            self.away = false;
            self.looks = polling.away.swap(false, Ordering::SeqCst);
            return if self.looks { Wait::Not } else { Wait::All };
        }
        if std::mem::take(&mut self.looks) && came {
            if polling.taken.load(Ordering::Relaxed) < RELIABLE {
                self.stay = (2 * self.stay).clamp(STAY, LONGEST_STAY);
                self.until = now + self.stay;
            } else {
                self.stay = 0;
            }
        }
        if came && polled && now >= self.until && !polling.to_spare {
            polling.taken.store(0, Ordering::Relaxed);
            polling.away.store(true, Ordering::SeqCst);
            // A program that is about to sleep has counted itself in `armed` before it looks whether the thread is
            // away.
            if polling.armed.load(Ordering::SeqCst) == 0 {
                (self.away, self.look) = (true, LOOK);
                return Wait::Away(LOOK);
            }
            polling.away.store(false, Ordering::SeqCst);
        }
        Wait::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1 << 40;

    fn scarce() -> Polling {
        Polling { to_spare: false, ..Polling::default() }
    }

    fn polled(polling: &Polling, at: u64) {
        polling.last.store(at, Ordering::Relaxed);
    }

    #[test]
    fn the_thread_is_away_while_a_program_polls() {
        let (polling, mut absence) = (scarce(), Absence::default());
        assert_eq!(absence.next(&polling, START, true), Wait::All, "nobody polls");
        polled(&polling, START);
        assert_eq!(absence.next(&polling, START, false), Wait::All, "nothing came");
        let mut now = START;
        for look in [LOOK, 2 * LOOK, 4 * LOOK, 8 * LOOK, LONGEST_LOOK] {
            polled(&polling, now);
            assert_eq!(absence.next(&polling, now, look == LOOK), Wait::Away(look));
            now += look;
        }
        assert_eq!(absence.next(&polling, now, false), Wait::Not, "looks for packets when nobody polls any more");
        assert_eq!(absence.next(&polling, now, false), Wait::All, "none were left lying");
        polled(&polling, now);
        assert_eq!(absence.next(&polling, now, true), Wait::Away(LOOK), "so it relies on the program again");
    }

    #[test]
    fn it_stays_where_packets_are_left_lying() {
        let (polling, mut absence) = (scarce(), Absence::default());
        let mut now = START;
        for stay in [STAY, 2 * STAY, 4 * STAY] {
            polled(&polling, now);
            assert_eq!(absence.next(&polling, now, true), Wait::Away(LOOK));
            now += LOOK;
            assert_eq!(absence.next(&polling, now, false), Wait::Not);
            assert_eq!(absence.next(&polling, now, true), Wait::All);
            polled(&polling, now + stay - 1);
            assert_eq!(absence.next(&polling, now + stay - 1, true), Wait::All);
            now += stay;
        }
        // One that has taken many was kept from running.
        polled(&polling, now);
        assert_eq!(absence.next(&polling, now, true), Wait::Away(LOOK));
        (0..RELIABLE).for_each(|_| polling.found(None));
        now += LOOK;
        assert_eq!(absence.next(&polling, now, false), Wait::Not);
        polled(&polling, now);
        assert_eq!(absence.next(&polling, now, true), Wait::Away(LOOK));
    }

    #[test]
    fn it_stays_where_there_are_processors_to_spare() {
        let (polling, mut absence) = (Polling { to_spare: true, ..Polling::default() }, Absence::default());
        polled(&polling, START);
        assert_eq!(absence.next(&polling, START, true), Wait::All);
        assert!(polling.came(MANY), "many bytes");
        assert_eq!(absence.next(&polling, now(), true), Wait::Not);
    }

    #[test]
    fn it_stays_while_a_queue_notifies() {
        let (polling, mut absence) = (scarce(), Absence::default());
        polled(&polling, START);
        polling.armed.fetch_add(1, Ordering::SeqCst);
        assert_eq!(absence.next(&polling, START, true), Wait::All);
        assert!(!polling.away.load(Ordering::SeqCst));
        polling.armed.fetch_sub(1, Ordering::SeqCst);
        assert_eq!(absence.next(&polling, START, true), Wait::Away(LOOK));
        // As `come_back` has it.
        polling.away.store(false, Ordering::SeqCst);
        assert_eq!(absence.next(&polling, START, false), Wait::All, "called back");
    }
}
