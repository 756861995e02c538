//! The words by which ranks at the board agree, with their memory orderings: all of the protocol's are in this file, and in
//! [`Sequence`](crate::transport::shm::Sequence), the number of a line.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::transport::sync::{AtomicU32, AtomicU64, Futex, Step, fence, order};

/// Last call that a rank is done with.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Finished(AtomicU64);

impl Finished {
    /// We read nothing of `call` and the calls before any more, and have written what others await of them.
    #[inline(always)]
    pub(super) fn set(&self, call: u64) {
        self.0.store(call, order(Step::Finish, Ordering::Release));
    }

    /// What was read may be written again, what was written may be read.
    #[inline(always)]
    pub(super) fn get(&self) -> u64 {
        self.0.load(order(Step::SeeFinished, Ordering::Acquire))
    }
}

/// Number and digest of the last call that a rank has begun, which tell when ranks have made different ones. It orders nothing:
/// who sees that a call has ended sees its stamp, or a later one.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Stamp(AtomicU64);

impl Stamp {
    #[inline(always)]
    pub(super) fn set(&self, stamp: u64) {
        self.0.store(stamp, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a rank says of its calls, in one cache line: who looks for credit sees both.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Ends {
    pub(super) finished: Finished,
    pub(super) stamp: Stamp,
}

/// How many ranks sleep, or are about to.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Sleepers(AtomicU32);

impl Sleepers {
    /// A glance, after a fence.
    #[inline(always)]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// One more. The sleeper's fence must follow, and then another look for what is awaited.
    pub(super) fn enter(&self) {
        self.0.fetch_add(1, order(Step::Wake, Ordering::AcqRel));
    }

    pub(super) fn leave(&self) {
        self.0.fetch_sub(1, order(Step::Wake, Ordering::AcqRel));
    }
}

/// Whether a rank sleeps: 1 from before it does until somebody wakes it, or it wakes by itself. All changes are exchanges:
/// sleeper and wakers agree on their order without any thought of what a plain store might be ordered with.
#[repr(transparent)]
#[derive(Debug, Default)]
pub(super) struct Asleep(Futex);

impl Asleep {
    /// Before [`Sleepers::enter`].
    pub(super) fn lie_down(&self) {
        self.0.word().swap(1, order(Step::Wake, Ordering::AcqRel));
    }

    /// Until woken, at most for `slice`; not at all when woken since [`Asleep::lie_down`].
    pub(super) fn sleep(&self, slice: Duration) {
        self.0.wait(1, slice);
    }

    /// True when nobody has woken us.
    pub(super) fn get_up(&self) -> bool {
        self.0.word().swap(0, order(Step::Wake, Ordering::AcqRel)) != 0
    }

    /// Wakes the rank if it sleeps.
    pub(super) fn wake(&self) {
        if self.0.word().swap(0, order(Step::Wake, Ordering::AcqRel)) != 0 {
            self.0.wake();
        }
    }
}

/// Four words under a sequence lock: the header of the last call which a rank makes over links.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Announcement {
    /// Odd while the words are being written.
    number: AtomicU64,
    words: [AtomicU64; 4],
}

impl Announcement {
    /// By one rank only. Announcements are rare next to what follows them, so a full fence is cheap.
    pub(super) fn write(&self, words: [u64; 4]) {
        let number = self.number.load(Ordering::Relaxed);
        self.number.store(number + 1, Ordering::Relaxed);
        fence(order(Step::Announcing, Ordering::SeqCst));
        for (to, word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.number.store(number + 2, order(Step::Announce, Ordering::Release));
    }

    /// The last one that is complete; `None` when there is none, or while the next one is being written.
    pub(super) fn read(&self) -> Option<[u64; 4]> {
        let before = self.number.load(order(Step::SeeAnnounced, Ordering::Acquire));
        let words = [0, 1, 2, 3].map(|i: usize| self.words[i].load(Ordering::Relaxed));
        fence(order(Step::LookTwice, Ordering::SeqCst));
        let same = self.number.load(Ordering::Relaxed) == before;
        (before > 0 && before.is_multiple_of(2) && same).then_some(words)
    }
}
